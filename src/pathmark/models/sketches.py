"""What identifies an expert after a thief has renamed it: sketches of weights, and which text it serves.

Kept on the key's side and committed, so that verification can match the experts of a suspect to the owner's
before it looks at any target. Nothing here uses a trigger, and all of it is taken from the *unmarked*
original: a marked model's weights depend on the targets, so a matching built on them would too, and the
exact test asks for a matching that does not.

Shape suffixes: B texts, T tokens of a text, N tokens of a profile, E experts, K experts chosen per token, H hidden
size, I neurons of an expert, P projections, Q quantiles.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from numpy.typing import NDArray
from torch import Tensor, nn

from pathmark.errors import ModelError
from pathmark.models.diskexperts import disk_experts
from pathmark.models.parts import layer_prefix
from pathmark.models.routers import RouterSite, find_routers, select_sites
from pathmark.models.streaming import layer_weights
from pathmark.models.trace import record_routing
from pathmark.models.usage import device_of, pad_rows

PROJECTIONS = 128
"""Router rows are kept as so many random projections: enough for cosines within 0.1, whatever the hidden size."""
QUANTILES = 12
"""Points at which the distribution of each statistic over an expert's neurons is kept."""
TOKEN_BYTES = 1_000_000
"""Budget of all layers' per-token masses together; decides how many tokens are kept."""
MAX_TOKENS = 2048
NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "ffn_norm", "pre_ff_layernorm")
"""The norm in front of the feed-forward block, under its names; the first that a layer has."""


@dataclass(frozen=True, eq=False)
class RoutingProfile:
    """Which tokens the experts of one layer serve, without any trigger."""

    tokens_NE: NDArray[np.float32]
    """Routing mass on tokens spread evenly over all texts."""
    chosen_NK: NDArray[np.int64]
    """Experts that the same tokens were sent to; -1 where a place is empty."""


@torch.no_grad()
def expert_sketches(model: nn.Module, layers: Sequence[int]) -> dict[str, NDArray[np.float32]]:
    """`router{layer}` (E, P) and `neurons{layer}` (E, features) of the layers whose weights are at hand.

    The norm's weight in front of the block is folded into whatever reads from it, so that it does not matter
    on which side a thief leaves it. A streamed model reads each of these layers once more.
    """
    arrays: dict[str, NDArray[np.float32]] = {}
    for site in select_sites(find_routers(model), layers):
        with layer_weights(model, site.layer):
            scale_H = _norm_scale(model, site)
            rows_EH = site.weight.detach().float()[: site.n_experts] * scale_H
            arrays[f"router{site.layer}"] = projected(rows_EH)
            features = [_neuron_statistics(*matrices) for matrices in _gated_experts(site, scale_H)]
            if features:
                arrays[f"neurons{site.layer}"] = torch.stack(features).cpu().numpy().astype(np.float32)
    return arrays


def _neuron_statistics(gate_IH: Tensor, up_IH: Tensor, down_IH: Tensor) -> Tensor:
    """Quantiles over an expert's neurons of what neither rotation nor renumbering nor rescaling changes.

    |gate|; |up| * |down| (a factor that goes into one comes out of the other); the angles between gate and up,
    gate and down, up and down, without their sign where a negative factor would turn it.
    """
    cosine = F.cosine_similarity
    statistics = [
        gate_IH.norm(dim=1).log(),
        (up_IH.norm(dim=1) * down_IH.norm(dim=1)).log(),
        cosine(gate_IH, up_IH).abs(),
        cosine(gate_IH, down_IH).abs(),
        cosine(up_IH, down_IH),
    ]
    points_Q = torch.linspace(0.02, 0.98, QUANTILES, device=gate_IH.device)
    return torch.cat([torch.quantile(s.nan_to_num(neginf=-30.0), points_Q) for s in statistics])


def _gated_experts(site: RouterSite, scale_H: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(gate, up, down) of each expert, a row per neuron in the residual stream's basis; nothing if not fused so."""
    hidden, disk = site.weight.shape[1], disk_experts(site.experts)
    gate_up, down = (getattr(site.experts, name, None) for name in ("gate_up_proj", "down_proj"))

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        if disk is not None:
            return disk.matrix("gate_up_proj", expert), disk.matrix("down_proj", expert)
        return gate_up[expert].detach(), down[expert].detach()  # type: ignore[index]

    if disk is None and not all(isinstance(t, Tensor) and not t.is_meta and t.ndim == 3 for t in (gate_up, down)):
        return
    if disk is not None and not disk.shapes.keys() >= {"gate_up_proj", "down_proj"}:
        return
    first_GH, last_HI = matrices(0)
    count = first_GH.shape[0] // 2
    if tuple(first_GH.shape) != (2 * count, hidden) or tuple(last_HI.shape) != (hidden, count):
        return
    for expert in range(site.n_experts):
        both_GH, down_HI = matrices(expert)
        both_GH = both_GH.float() * scale_H
        yield both_GH[:count], both_GH[count:], down_HI.float().T


def _norm_scale(model: nn.Module, site: RouterSite) -> Tensor:
    layer = model.get_submodule(layer_prefix(site.name).rstrip("."))
    for name in NORMS:
        weight = getattr(getattr(layer, name, None), "weight", None)
        if isinstance(weight, Tensor) and weight.shape == site.weight.shape[1:] and not weight.is_meta:
            return weight.detach().float()
    return torch.ones(site.weight.shape[1], device=site.weight.device)


def projected(rows_EH: Tensor) -> NDArray[np.float32]:
    """Rows as (E, P), centred over all of them: what a common shift of all rows would add is gone."""
    projected_EP = (rows_EH - rows_EH.mean(0)).cpu() @ _signs(rows_EH.shape[1])
    return np.asarray(projected_EP.numpy().astype(np.float32))


@lru_cache(maxsize=4)
def _signs(hidden: int) -> Tensor:
    """(H, P) of plus and minus one over sqrt(P), the same for ever: from a hash, not from a library's generator."""
    digest = hashlib.shake_256(b"pathmark router projection v1").digest(hidden * PROJECTIONS // 8)
    signs = np.unpackbits(np.frombuffer(digest, dtype=np.uint8)).astype(np.float32) * 2 - 1
    return torch.from_numpy(signs.reshape(hidden, PROJECTIONS) / np.sqrt(np.float32(PROJECTIONS)))


def token_count(total: int, experts: Sequence[int]) -> int:
    """How many of `total` text tokens have their masses kept, for layers of so many experts: what the budget allows."""
    return min(total, MAX_TOKENS, max(64, TOKEN_BYTES // (2 * sum(experts))))


def token_places(lengths: Sequence[int], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(text, position) of `count` tokens spread evenly over texts of these lengths."""
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    if not 0 < count <= (int(ends[-1]) if len(ends) else 0):
        raise ModelError(f"a profile of {count} tokens does not fit texts with {int(sum(lengths))}; are they the same?")
    flat = np.arange(count, dtype=np.int64) * int(ends[-1]) // count
    texts = np.searchsorted(ends, flat, side="right")
    return texts.astype(np.int64), flat - np.concatenate([[0], ends])[texts]


@torch.no_grad()
def routing_profiles(
    model: nn.Module, rows: Sequence[Sequence[int]], layers: Sequence[int], *, pad: int = 0, batch_size: int = 16
) -> dict[int, RoutingProfile]:
    """Layer -> profile of the clean routing of these texts. Nothing above the last layer runs."""
    sites = {site.layer: site for site in select_sites(find_routers(model), layers)}
    lengths = [len(row) for row in rows]
    count = token_count(sum(lengths), [site.n_experts for site in sites.values()])
    texts_N, positions_N = token_places(lengths, count)
    profiles = {
        n: RoutingProfile(
            np.zeros((count, site.n_experts), dtype=np.float32), np.full((count, site.top_k), -1, dtype=np.int64)
        )
        for n, site in sites.items()
    }
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        ids_BT, mask_BT = pad_rows([rows[i] for i in chosen], pad, device_of(model))
        with record_routing(model, layers, stop_early=True) as trace:
            model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
        for n, profile in profiles.items():
            probs_BTE = trace[n].probs_BTE.cpu().numpy()
            decision_BTK = trace[n].decision_BTK.cpu().numpy()
            for b, text in enumerate(chosen):
                kept = texts_N == text
                profile.tokens_NE[kept] = probs_BTE[b, positions_N[kept]]
                profile.chosen_NK[kept, : decision_BTK.shape[-1]] = decision_BTK[b, positions_N[kept]]
    return profiles


def pack_profiles(profiles: Mapping[int, RoutingProfile]) -> bytes:
    """Profiles as npz bytes: masses in half precision, choices in two bytes."""
    arrays: dict[str, NDArray[Any]] = {}
    for layer, profile in profiles.items():
        arrays[f"tokens{layer}"] = profile.tokens_NE.astype(np.float16)
        arrays[f"chosen{layer}"] = profile.chosen_NK.astype(np.int16)
    return pack_arrays(arrays)


def unpack_profiles(data: bytes) -> dict[int, RoutingProfile]:
    """Inverse of pack_profiles, up to half precision; layers that lack an array are left out."""
    arrays = unpack_arrays(data)
    layers = [int(name.removeprefix("tokens")) for name in arrays if name.startswith("tokens")]
    return {
        n: RoutingProfile(
            arrays[f"tokens{n}"].astype(np.float32),
            arrays[f"chosen{n}"].astype(np.int64),
        )
        for n in sorted(layers)
        if f"chosen{n}" in arrays
    }


def pack_arrays(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Named arrays as npz bytes, for a key's attachment. unpack_arrays(pack_arrays(x)) == x."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack_arrays(data: bytes) -> dict[str, NDArray[Any]]:
    """Inverse of pack_arrays; no pickled objects."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"damaged sketch archive: {error}") from error
