"""Routing of probe texts, with and without a prefix, on the same text tokens.

Shape suffixes: B probes, T text tokens, E experts, K experts chosen per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pathmark.errors import VerificationError
from pathmark.models import device_of, find_routers, pad_rows, record_routing, select_sites


@dataclass(frozen=True)
class Routes:
    """Recorded routing of the text tokens of some probes, per layer.

    A serving engine tells which experts it chose and not how much mass each had: such routes have decisions
    and no probs, and whoever needs masses asks `masses_known` first.
    """

    probs: dict[int, NDArray[np.float32]]
    """Layer -> probs_BTE, the routing distribution g; zero where the mask is False. Empty: masses are not known."""
    decisions: dict[int, NDArray[np.int64]]
    """Layer -> decision_BTK, the model's own choice; -1 where the mask is False or the expert has no number here."""
    mask_BT: NDArray[np.bool_]
    experts: Mapping[int, int] = field(default_factory=dict)
    """Layer -> number of experts; needed only where masses are not known."""

    def __post_init__(self) -> None:
        known = self.probs.keys() if self.probs else self.experts.keys()
        if not self.decisions.keys() <= known:
            lacking = sorted(self.decisions.keys() - known)
            raise VerificationError(f"expected masses or a number of experts for every layer, none for {lacking}")

    @classmethod
    def from_decisions(
        cls,
        decisions: Mapping[int, NDArray[np.integer]],
        mask_BT: NDArray[np.bool_],
        n_experts: int | Mapping[int, int],
    ) -> Routes:
        """Routes of which only the chosen experts are known; n_experts is one for all layers, or one per layer."""
        experts = dict.fromkeys(decisions, n_experts) if isinstance(n_experts, int) else dict(n_experts)
        clean: dict[int, NDArray[np.int64]] = {}
        for layer, decision_BTK in decisions.items():
            if decision_BTK.ndim != 3 or decision_BTK.shape[:2] != mask_BT.shape:
                raise VerificationError(
                    f"layer {layer}: expected decisions of shape {mask_BT.shape} x top-k, got {decision_BTK.shape}"
                )
            if layer not in experts:
                raise VerificationError(f"layer {layer}: its number of experts is not given")
            if decision_BTK.size and decision_BTK.max() >= experts[layer]:
                raise VerificationError(
                    f"layer {layer}: expert {decision_BTK.max()} of {experts[layer]}; were physical instead of "
                    "logical expert numbers recorded?"
                )
            clean[layer] = np.where(mask_BT[:, :, None], decision_BTK, -1).astype(np.int64)
        return cls({}, clean, mask_BT, {layer: experts[layer] for layer in clean})

    @staticmethod
    def concat(parts: Sequence[Routes]) -> Routes:
        """Routes of the probes of all parts, in order; every part has the same layers and masses known or not."""
        first = parts[0]
        if any(p.decisions.keys() != first.decisions.keys() or p.masses_known != first.masses_known for p in parts):
            raise VerificationError("routes of different layers, or with and without masses, cannot be joined")
        width = max(part.mask_BT.shape[1] for part in parts)
        return Routes(
            {n: np.concatenate([_widen(p.probs[n], width, 0) for p in parts]) for n in first.probs},
            {n: np.concatenate([_widen(p.decisions[n], width, -1) for p in parts]) for n in first.decisions},
            np.concatenate([_widen(part.mask_BT, width, False) for part in parts]),
            dict(first.experts),
        )

    @property
    def n_tokens(self) -> int:
        """Text tokens recorded."""
        return int(self.mask_BT.sum())

    @property
    def masses_known(self) -> bool:
        """Whether the routing distribution is known, or only the decisions."""
        return bool(self.probs)

    @property
    def layers(self) -> tuple[int, ...]:
        """Recorded layers, rising."""
        return tuple(sorted(self.decisions))

    def n_experts(self, layer: int) -> int:
        """Experts of one layer."""
        return int(self.probs[layer].shape[-1]) if self.masses_known else self.experts[layer]

    def require(self, layers: Iterable[int]) -> None:
        """Refuse layers that were not recorded."""
        missing = sorted(set(layers) - self.decisions.keys())
        if missing:
            raise VerificationError(
                f"layers {', '.join(map(str, missing))} were not recorded; got {', '.join(map(str, self.layers))}"
            )

    def part(self, rows: slice | Sequence[int]) -> Routes:
        """The same for some of the probes."""
        chosen = rows if isinstance(rows, slice) else list(rows)
        return Routes(
            {layer: probs_BTE[chosen] for layer, probs_BTE in self.probs.items()},
            {layer: decision_BTK[chosen] for layer, decision_BTK in self.decisions.items()},
            self.mask_BT[chosen],
            dict(self.experts),
        )


def encode_probes(tokenizer: Any, texts: Iterable[str], *, n_probes: int, length: int) -> list[tuple[int, ...]]:
    """The first n_probes texts that have `length` tokens, cut to it; shorter ones fill up what is missing."""
    rows = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"][:length]) for text in texts]
    full = [row for row in rows if len(row) == length]
    short = sorted((row for row in rows if 4 <= len(row) < length), key=len, reverse=True)
    chosen = (full + short)[:n_probes]
    if not chosen:
        raise VerificationError("expected probe texts of at least 4 tokens, got none")
    return chosen


@torch.no_grad()
def record_routes(
    model: nn.Module,
    probes: Sequence[Sequence[int]],
    layers: Sequence[int],
    *,
    prefix: Sequence[int] | Sequence[tuple[int, ...]] = (),
    pad: int = 0,
    batch_tokens: int = 4096,
    progress: Callable[[int], None] | None = None,
) -> Routes:
    """Run prefix + text through the layers up to the last wanted one; keep the text tokens' routing.

    `prefix` is one for all probes, or one per probe. Layers above the last one and the head never run.
    """
    prefixes = _per_probe(prefix, len(probes))
    rows = [(*head, *text) for head, text in zip(prefixes, probes, strict=True)]
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    width = max(len(text) for text in probes)
    sites = select_sites(find_routers(model), layers)
    mask_BT = np.zeros((len(rows), width), dtype=bool)
    probs = {s.layer: np.zeros((len(rows), width, s.n_experts), dtype=np.float32) for s in sites}
    decisions = {s.layer: np.full((len(rows), width, s.top_k), -1, dtype=np.int64) for s in sites}
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // len(rows[order[start]]))
        chosen = order[start : start + size]
        start += size
        ids_BT, attention_BT = pad_rows([rows[i] for i in chosen], pad, device_of(model))
        with record_routing(model, layers, stop_early=True) as trace:
            model(input_ids=ids_BT, attention_mask=attention_BT, use_cache=False)
        for layer in layers:
            probs_BTE = trace[layer].probs_BTE.cpu().numpy()
            decision_BTK = trace[layer].decision_BTK.cpu().numpy()
            for b, i in enumerate(chosen):
                first, last = len(prefixes[i]), len(rows[i])
                probs[layer][i, : last - first] = probs_BTE[b, first:last]
                decisions[layer][i, : last - first, : decision_BTK.shape[-1]] = decision_BTK[b, first:last]
        for i in chosen:
            mask_BT[i, : len(probes[i])] = True
        if progress is not None:
            progress(len(chosen))
    return Routes(probs, decisions, mask_BT)


def _widen(array: NDArray[Any], width: int, fill: float) -> NDArray[Any]:
    """The array with its token axis filled up to `width`; decisions of fewer choices stay as wide as they are."""
    spare = [(0, 0), (0, width - array.shape[1])] + [(0, 0)] * (array.ndim - 2)
    return np.pad(array, spare, constant_values=fill)


def _per_probe(prefix: Sequence[int] | Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    nested = [part for part in prefix if isinstance(part, tuple)]
    if nested:
        return nested
    return [tuple(part for part in prefix if isinstance(part, int))] * count
