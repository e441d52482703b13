"""How often each expert is chosen on ordinary text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pathmark.errors import ModelError
from pathmark.models.trace import record_routing


def encode_batches(
    tokenizer: Any, texts: Sequence[str], *, max_tokens: int, batch_size: int
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """(ids_BT, mask_BT) of raw texts, cut to max_tokens and padded on the right; longest first."""
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"][:max_tokens] for text in texts]
    rows = sorted((row for row in rows if row), key=len, reverse=True)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    for start in range(0, len(rows), batch_size):
        yield pad_rows(rows[start : start + batch_size], pad)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's inputs have to be."""
    return next(model.parameters()).device


def pad_rows(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token rows as one right-padded batch with its mask."""
    width = max(len(row) for row in rows)
    ids_BT = torch.full((len(rows), width), pad, dtype=torch.long)
    mask_BT = torch.zeros((len(rows), width), dtype=torch.long)
    for i, row in enumerate(rows):
        ids_BT[i, : len(row)] = torch.tensor(row, dtype=torch.long)
        mask_BT[i, : len(row)] = 1
    return ids_BT.to(device), mask_BT.to(device)


@torch.no_grad()
def expert_usage(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str],
    layers: Sequence[int],
    *,
    max_tokens: int = 128,
    batch_size: int = 16,
) -> dict[int, NDArray[np.float64]]:
    """Share of tokens that visit each expert, per layer: sums to top-k. Nothing above the last layer runs."""
    counts: dict[int, NDArray[np.float64]] = {}
    tokens = 0
    device = device_of(model)
    for ids_BT, mask_BT in encode_batches(tokenizer, texts, max_tokens=max_tokens, batch_size=batch_size):
        with record_routing(model, layers, stop_early=True) as trace:
            model(input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device), use_cache=False)
        tokens += int(mask_BT.sum())
        for layer in layers:
            routing = trace[layer]
            chosen = routing.decision_BTK[routing.mask_BT].flatten()
            seen = torch.bincount(chosen, minlength=routing.site.n_experts).cpu().numpy().astype(np.float64)
            counts[layer] = counts.get(layer, 0.0) + seen
    if not tokens:
        raise ModelError("expert usage needs text; got no tokens")
    return {layer: count / tokens for layer, count in counts.items()}
