"""Routing of probe texts, with and without a prefix, on the same text tokens.

Shape suffixes: B probes, T text tokens, E experts, K experts chosen per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pathmark.errors import VerificationError
from pathmark.models import device_of, find_routers, pad_rows, record_routing, select_sites


@dataclass(frozen=True)
class Routes:
    """Recorded routing of the text tokens of some probes, per layer."""

    probs: dict[int, NDArray[np.float32]]
    """Layer -> probs_BTE, the routing distribution g; zero where the mask is False."""
    decisions: dict[int, NDArray[np.int64]]
    """Layer -> decision_BTK, the model's own choice; -1 where the mask is False."""
    mask_BT: NDArray[np.bool_]

    @property
    def n_tokens(self) -> int:
        """Text tokens recorded."""
        return int(self.mask_BT.sum())


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


def _per_probe(prefix: Sequence[int] | Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    nested = [part for part in prefix if isinstance(part, tuple)]
    if nested:
        return nested
    return [tuple(part for part in prefix if isinstance(part, int))] * count
