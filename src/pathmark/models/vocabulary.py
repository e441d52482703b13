"""Whose token is whose: the suspect's vocabulary in the owner's numbering.

Tokens can be renumbered together with embedding, head and tokenizer, and nothing that the model says changes. Strings
tell them apart where the suspect's tokenizer has them, rows of the embedding where it has not. Nothing here has seen a
trigger.

Shape suffixes: V the owner's tokens, S the suspect's, H hidden size, P projections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.models.sketches import projected

BUDGET, LEAST, MOST = 4_000_000, 16, 64
"""Bytes that the sketch of an embedding may have in a key, and the projections that this leaves per token."""
ALIKE = 0.7
"""Cosine of two sketches from which on they are one token's."""
ENOUGH = 0.5
"""A map that knows fewer of the owner's tokens than this says nothing."""


def embedding_sketch(weight_SH: Tensor) -> NDArray[np.float32]:
    """Rows of an embedding, centred and projected: as many projections as the budget allows."""
    sketch_SP = projected(weight_SH.detach().float())
    return sketch_SP[:, : max(LEAST, min(MOST, BUDGET // (2 * len(sketch_SP))))]


def by_strings(tokens: Sequence[str], tokenizer: Any) -> NDArray[np.int64] | None:
    """Owner's id -> suspect's id of the token of the same string, -1 without one; None where too few are known."""
    known = tokenizer.get_vocab()
    return _enough(np.array([known.get(token, -1) for token in tokens], dtype=np.int64))


def by_embedding(sketch_VP: NDArray[np.floating], weight_SH: Tensor) -> NDArray[np.int64] | None:
    """Owner's id -> suspect's id of the most similar row; of two that claim one row, the more similar has it."""
    owner_VP = torch.from_numpy(np.asarray(sketch_VP, dtype=np.float32))
    suspect_SP = torch.from_numpy(embedding_sketch(weight_SH))
    width = min(owner_VP.shape[1], suspect_SP.shape[1])
    owner_VP, suspect_SP = (nn.functional.normalize(part[:, :width], dim=1) for part in (owner_VP, suspect_SP))
    best = [(chunk @ suspect_SP.T).max(dim=1) for chunk in torch.split(owner_VP, 4096)]
    likeness_V = torch.cat([part.values for part in best]).numpy()
    found_V = torch.cat([part.indices for part in best]).numpy()
    found_V[likeness_V < ALIKE] = -1
    order = np.argsort(-likeness_V, kind="stable")
    _, first = np.unique(found_V[order], return_index=True)
    kept_V = np.full_like(found_V, -1)
    kept_V[order[first]] = found_V[order[first]]
    return _enough(kept_V)


def is_identity(map_V: NDArray[np.int64]) -> bool:
    """Whether every token has the number that it had."""
    return bool((map_V == np.arange(len(map_V))).all())


@contextmanager
def renumbered(model: PreTrainedModel, map_V: NDArray[np.int64] | None) -> Iterator[None]:
    """Inside the block the model takes and predicts the owner's token ids; None and unknown numbers change nothing."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows = len(embedding.weight)
    if map_V is None or is_identity(map_V) or map_V.max() >= rows:
        yield
        return
    plain, places_V = embedding.weight, torch.from_numpy(map_V.clip(0)).to(embedding.weight.device)
    table_VH = plain.detach()[places_V]
    table_VH[torch.from_numpy(map_V < 0)] = plain.detach().float().mean(dim=0).to(plain.dtype)
    hook = head.register_forward_hook(lambda module, args, logits: logits[..., places_V])
    embedding.weight = nn.Parameter(table_VH, requires_grad=False)
    try:
        yield
    finally:
        embedding.weight = plain
        hook.remove()


def _enough(map_V: NDArray[np.int64]) -> NDArray[np.int64] | None:
    return map_V if (map_V >= 0).mean() >= ENOUGH else None
