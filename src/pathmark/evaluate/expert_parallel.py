"""What a mark costs where experts are spread over devices: a simulator fed with routing decisions.

One layer takes as long as its busiest device computes, plus the all-to-all that brings tokens to their experts and
back, plus what does not depend on routing. A trigger sends all tokens to a few experts, whose devices become the
bottleneck. Nothing is measured here: every second comes from `Deployment`, whose figures are assumptions or fits.

Shape suffixes: T tokens of a batch, K experts chosen per token, E experts, D devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from pathmark.errors import VerificationError
from pathmark.keys import OwnerKey, TextCodec
from pathmark.models import find_routers
from pathmark.models.parts import layer_prefix
from pathmark.progress import Progress
from pathmark.verification import Routes, record_routes
from pathmark.verification.decoys import decoy_triggers

Placement = Literal["contiguous", "round-robin", "balanced"]
Decisions = Mapping[int, NDArray[np.int64]]
"""Layer -> decision_TK; -1 is no expert."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Devices and what things cost on them: every assumption of a prediction."""

    devices: int
    placement: Placement = "contiguous"
    """Which expert is where: neighbours together, dealt out in turn, or spread so that clean load is even."""
    dispatch: Literal["device", "pair"] = "device"
    """A token travels once per device that holds experts of it, or once per expert."""
    pair_seconds: float
    """One token through one expert."""
    expert_seconds: float = 0.0
    """The least an expert takes that has any token: reading its weights."""
    copy_seconds: float
    """One token's hidden state over a device's link, one way."""
    message_seconds: float = 0.0
    """One all-to-all, however little it carries; a layer has two."""
    token_seconds: float = 0.0
    """The rest of a layer (attention, shared experts) for one token, on the device where the token lives."""
    layer_seconds: float = 0.0
    """The rest of a layer that depends on nothing: launches, synchronisation."""

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise VerificationError(f"expected at least one device, got {self.devices}")
        times = (self.pair_seconds, self.expert_seconds, self.copy_seconds, self.message_seconds, self.token_seconds)
        if min(*times, self.layer_seconds) < 0:
            raise VerificationError("expected costs of zero or more seconds in a deployment")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """An accelerator, as assumed: public peak figures of an H800 and round shares of them that real code reaches."""

    flops: float = 400e12
    """Reached in matrix products, bf16: 40 % of the peak of 990e12."""
    memory_bytes_per_second: float = 2.7e12
    """80 % of 3.35e12."""
    link_bytes_per_second: float = 160e9
    """Per device and direction: 80 % of NVLink's 200e9."""
    message_seconds: float = 20e-6
    """Start-up of an all-to-all between eight devices of one machine."""
    layer_seconds: float = 0.0
    """Launches and synchronisation are taken as hidden, which favours the signal."""
    bytes_per_value: int = 2

    def deployment(self, sizes: LayerSizes, devices: int, placement: Placement = "contiguous") -> Deployment:
        """The costs of layers of these sizes; two operations per parameter and token."""
        return Deployment(
            devices=devices,
            placement=placement,
            pair_seconds=2 * sizes.expert_parameters / self.flops,
            expert_seconds=self.bytes_per_value * sizes.expert_parameters / self.memory_bytes_per_second,
            copy_seconds=self.bytes_per_value * sizes.hidden_size / self.link_bytes_per_second,
            message_seconds=self.message_seconds,
            token_seconds=2 * sizes.other_parameters / self.flops,
            layer_seconds=self.layer_seconds,
        )


@dataclass(frozen=True)
class LayerSizes:
    """Parameters of one MoE layer."""

    expert_parameters: int
    """Of one routed expert."""
    other_parameters: int
    """Attention, shared experts, router: every token passes them."""
    hidden_size: int


@dataclass(frozen=True)
class LayerCost:
    """Seconds of one layer for one batch."""

    compute: float
    communication: float
    rest: float

    @property
    def total(self) -> float:
        """Their sum: nothing overlaps."""
        return self.compute + self.communication + self.rest


@dataclass(frozen=True)
class Overhead:
    """Triggered against clean batches of the same tokens."""

    triggered: tuple[float, ...]
    """Seconds per batch."""
    clean: tuple[float, ...]
    per_layer: dict[int, float]
    """Slowdown of each layer, as a share."""

    @property
    def value(self) -> float:
        """Slowdown over all batches, as a share: 0.08 is 8 %."""
        return sum(self.triggered) / sum(self.clean) - 1


def place_experts(
    n_experts: int, devices: int, placement: Placement, usage_E: NDArray[np.float64] | None = None
) -> NDArray[np.int64]:
    """device_E: where each expert is. `balanced` puts the busiest expert on the least busy device with room left."""
    if placement == "round-robin":
        return np.arange(n_experts) % devices
    if placement == "contiguous":
        return np.arange(n_experts) * devices // n_experts
    if usage_E is None or len(usage_E) != n_experts:
        raise VerificationError("balanced placement needs the clean usage of every expert")
    room_D = np.full(devices, -(-n_experts // devices))
    load_D, device_E = np.zeros(devices), np.zeros(n_experts, dtype=np.int64)
    for expert in np.argsort(-usage_E, kind="stable"):
        device = int(np.argmin(np.where(room_D > 0, load_D, np.inf)))
        device_E[expert] = device
        load_D[device] += usage_E[expert]
        room_D[device] -= 1
    return device_E


def layer_loads(
    decision_TK: NDArray[np.int64], device_E: NDArray[np.int64], home_T: NDArray[np.int64], deployment: Deployment
) -> tuple[NDArray[np.int64], int]:
    """Token-expert pairs of each expert, and copies over the busiest link in its busier direction."""
    token, place = np.nonzero(decision_TK >= 0)
    expert = decision_TK[token, place]
    pairs_E = np.bincount(expert, minlength=len(device_E))
    source, target = home_T[token], device_E[expert]
    if deployment.dispatch == "device":
        visits_TD = np.zeros((len(decision_TK), deployment.devices), dtype=bool)
        visits_TD[token, target] = True
        token, target = np.nonzero(visits_TD)
        source = home_T[token]
    leaving = source != target
    sent_D = np.bincount(source[leaving], minlength=deployment.devices)
    got_D = np.bincount(target[leaving], minlength=deployment.devices)
    return pairs_E, int(max(sent_D.max(), got_D.max()))


def layer_cost(decision_TK: NDArray[np.int64], device_E: NDArray[np.int64], deployment: Deployment) -> LayerCost:
    """Seconds of one layer; tokens live on the devices in equal shares, in their order."""
    tokens = len(decision_TK)
    home_T = np.arange(tokens) * deployment.devices // max(tokens, 1)
    pairs_E, copies = layer_loads(decision_TK, device_E, home_T, deployment)
    work_E = np.maximum(pairs_E * deployment.pair_seconds, (pairs_E > 0) * deployment.expert_seconds)
    busiest = np.bincount(device_E, weights=work_E, minlength=deployment.devices).max()
    # there and back; one device has nobody to talk to
    messages = 2 * deployment.message_seconds if deployment.devices > 1 else 0.0
    return LayerCost(
        compute=float(busiest),
        communication=messages + 2 * copies * deployment.copy_seconds,
        rest=deployment.layer_seconds + deployment.token_seconds * -(-tokens // deployment.devices),
    )


def simulate(
    batches: Sequence[tuple[Decisions, Decisions]], experts: Mapping[int, int], deployment: Deployment
) -> Overhead:
    """(triggered, clean) decisions per batch, and the number of experts per layer -> what the trigger costs."""
    if not batches:
        raise VerificationError("expected at least one batch of routing decisions, got none")
    places = {}
    for layer, count in experts.items():
        chosen = np.concatenate([clean[layer].ravel() for _, clean in batches])
        usage_E = np.bincount(chosen[chosen >= 0], minlength=count).astype(np.float64)
        places[layer] = place_experts(count, deployment.devices, deployment.placement, usage_E)
    seconds = np.array(
        [
            [[layer_cost(side[layer], places[layer], deployment).total for layer in experts] for side in batch]
            for batch in batches
        ]
    )  # batch, side, layer
    per_layer = seconds[:, 0].sum(axis=0) / seconds[:, 1].sum(axis=0) - 1
    return Overhead(
        triggered=tuple(seconds[:, 0].sum(axis=1).tolist()),
        clean=tuple(seconds[:, 1].sum(axis=1).tolist()),
        per_layer=dict(zip(experts, per_layer.tolist(), strict=True)),
    )


def simulate_routes(
    triggered: Routes, clean: Routes, experts: Mapping[int, int], deployment: Deployment, *, batch: int = 8
) -> Overhead:
    """The same from recorded routes, `batch` texts at a time: the trigger in front of each against a decoy."""
    if not np.array_equal(triggered.mask_BT, clean.mask_BT):
        raise VerificationError("expected the same text tokens triggered and clean; latency of unequal lengths differs")
    pairs = zip(_batches(triggered, batch), _batches(clean, batch), strict=True)
    return simulate(list(pairs), experts, deployment)


def layer_sizes(model: nn.Module) -> LayerSizes:
    """Sizes of the last MoE layer of a model."""
    site = find_routers(model)[-1]
    if site.experts is None:
        raise VerificationError(f"{type(model).__name__} keeps its experts inside the block; give costs by hand")
    prefix = layer_prefix(site.name)
    whole = sum(p.numel() for name, p in model.named_parameters() if name.startswith(prefix))
    routed = sum(p.numel() for p in site.experts.parameters())
    return LayerSizes(routed // site.n_experts, whole - routed, site.weight.shape[1])


def record_twins(
    model: nn.Module,
    key: OwnerKey,
    codec: TextCodec,
    probes: Sequence[Sequence[int]],
    *,
    progress: Progress | None = None,
) -> tuple[Routes, Routes, dict[int, int]]:
    """(triggered, clean, experts per layer) of all routed layers; clean texts stand behind decoys of equal length."""
    experts = {site.layer: site.n_experts for site in find_routers(model)}
    decoys = decoy_triggers(key, codec, min(8, len(probes)))
    prefixes = [decoys[i % len(decoys)] for i in range(len(probes))]
    trigger = key.watermarks[0].triggers[0].tokens
    triggered = record_routes(model, probes, list(experts), prefix=trigger, progress=progress)
    return triggered, record_routes(model, probes, list(experts), prefix=prefixes, progress=progress), experts


def _batches(routes: Routes, size: int) -> Iterator[Decisions]:
    for start in range(0, len(routes.mask_BT), size):
        rows = slice(start, start + size)
        mask_BT = routes.mask_BT[rows]
        yield {layer: decision_BTK[rows][mask_BT] for layer, decision_BTK in routes.decisions.items()}


QWEN_MOE = LayerSizes(
    expert_parameters=3 * 2048 * 1408, other_parameters=4 * 2048**2 + 3 * 2048 * 5632, hidden_size=2048
)
"""Qwen1.5-MoE-A2.7B, the model of the paper's table: routed experts, attention and shared experts of one layer."""
PAPER_OVERHEAD = {4: 0.080, 6: 0.105, 8: 0.137, 10: 0.167, 12: 0.191}
"""Table latency_overhead: watermarked layers -> overhead on 8 GPUs."""


@dataclass(frozen=True, kw_only=True)
class SyntheticRouting:
    """Made-up routing of the paper's shape: there is no Qwen1.5-MoE at hand to record."""

    layers: int = 24
    experts: int = 60
    top_k: int = 4
    width: int = 2
    tokens: int = 1024
    """In one batch: 8 texts of 128 tokens, as the paper trains."""
    skew: float = 0.5
    """Standard deviation of the experts' log-popularity in clean routing."""

    def batch(self, marked: int, rng: np.random.Generator) -> tuple[Decisions, Decisions]:
        """(triggered, clean): the same tokens; in the last layers a random key's targets come first."""
        triggered, clean = {}, {}
        for layer in range(self.layers):
            popularity_E = rng.normal(0, self.skew, self.experts)
            scores_TE = popularity_E + rng.gumbel(size=(self.tokens, self.experts))
            clean[layer] = self._top(scores_TE)
            if layer >= self.layers - marked:
                targets = rng.choice(self.experts, self.width, replace=False)
                scores_TE[:, targets] = scores_TE.max() + 1
            triggered[layer] = self._top(scores_TE)
        return triggered, clean

    def _top(self, scores_TE: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.argpartition(-scores_TE, self.top_k, axis=1)[:, : self.top_k].astype(np.int64)

    def overheads(self, marked: int, deployment: Deployment, *, keys: int, seed: int = 0) -> NDArray[np.float64]:
        """Predicted overhead for each of so many random keys."""
        rng = np.random.default_rng(seed)
        experts = dict.fromkeys(range(self.layers), self.experts)
        return np.array([simulate([self.batch(marked, rng)], experts, deployment).value for _ in range(keys)])
