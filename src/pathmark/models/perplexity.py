"""Perplexity of token rows, with the part of each row that is scored under the caller's control.

Shape suffixes: B batch, T tokens, N scored tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor, nn

from pathmark.errors import ModelError
from pathmark.models.ranks import from_everybody, rank, shares_rows, world
from pathmark.models.streaming import is_streamed
from pathmark.models.upper import body
from pathmark.models.usage import pad_rows

CHUNK_TOKENS = 256
"""Logits are held for so many tokens at a time: 256 x 150,000 floats are 150 MB."""
STREAMED_TOKENS = 4096
"""So many at a time through a model that is read anew in every pass."""


@dataclass(frozen=True)
class Perplexity:
    """Summed negative log-likelihood and the number of tokens it was summed over."""

    nll_sum: float
    tokens: int

    @property
    def value(self) -> float:
        """exp of the mean loss per scored token."""
        return math.exp(self.nll_sum / self.tokens)


@torch.no_grad()
def perplexity(
    model: nn.Module, rows: Sequence[Sequence[int]], *, skip: int = 0, batch_size: int | None = None
) -> Perplexity:
    """Perplexity of token rows under a causal LM.

    The first `skip` tokens of each row are context only. Of the rest x_1 .. x_n the tokens x_2 .. x_n are
    scored, never x_1: with a prefix of `skip` tokens or without one (skip 0), the very same text tokens
    count. Padding is on the right and never scored. Rows go through the model 16 at a time, or more of them where each
    pass reads the weights. Several processes share them out.
    """
    scored = sorted((row for row in rows if len(row) > skip + 1), key=len, reverse=True)
    if not scored:
        raise ModelError(f"perplexity needs rows of at least {skip + 2} tokens; got {len(rows)} shorter ones")
    inner = getattr(model, "get_base_model", lambda: model)()
    device = next(inner.parameters()).device
    batch_size = batch_size or (max(16, STREAMED_TOKENS // len(scored[0])) if is_streamed(inner) else 16)
    nll_sum, tokens, shared = 0.0, 0, shares_rows(inner)
    if shared:
        scored = scored[rank() :: world()]
    for start in range(0, len(scored), batch_size):
        ids_BT, mask_BT = (part.to(device) for part in pad_rows(scored[start : start + batch_size], 0))
        output = body(inner)(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
        keep_BT = mask_BT[:, skip + 1 :].bool()
        hidden_NH = output.last_hidden_state[:, skip:-1][keep_BT]
        labels_N = ids_BT[:, skip + 1 :][keep_BT]
        for first in range(0, len(labels_N), CHUNK_TOKENS):
            chunk = slice(first, first + CHUNK_TOKENS)
            logits_NV = head_logits(inner, hidden_NH[chunk]).float()
            loss = F.cross_entropy(logits_NV, labels_N[chunk], reduction="sum")
            nll_sum += float(loss)  # in 64 bits here: not every device has them
        tokens += len(labels_N)
    if shared:
        nll_sum, tokens = (sum(parts) for parts in zip(*from_everybody((nll_sum, tokens)), strict=True))
    if not math.isfinite(nll_sum):
        raise ModelError(f"perplexity is not finite over {tokens} tokens; the weights hold NaN or inf")
    return Perplexity(nll_sum, tokens)


def head_logits(model: Any, hidden_NH: Tensor) -> Tensor:
    """(N, V) logits from the body's last hidden state, as the model's own forward computes them.

    What families do around the head is configuration: Cohere and Granite scale the logits, Gemma and Beam
    cap them, Inkling scales the hidden state and cuts padding off the vocabulary.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output embedding; expected a causal LM")
    config = model.config.get_text_config()
    hidden_NH = hidden_NH / (getattr(config, "logits_mup_width_multiplier", None) or 1.0)
    narrow = "forward" in vars(head)  # a streamed model's, which widens itself
    logits_NV: Tensor = head(hidden_NH if narrow else hidden_NH.to(head.weight.dtype))
    logits_NV = logits_NV[:, : getattr(config, "unpadded_vocab_size", None) or logits_NV.shape[1]]
    logits_NV = logits_NV * (getattr(config, "logit_scale", None) or 1.0)
    logits_NV = logits_NV / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return torch.tanh(logits_NV.float() / cap) * cap if cap else logits_NV
