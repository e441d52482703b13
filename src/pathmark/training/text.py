"""Training on ordinary text: which rows a step sees, and their likelihood.

Shape suffixes: B batch, T tokens, H hidden size, N real tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pathmark.models.upper import body, output_head
from pathmark.training.loop import step_generator
from pathmark.training.vocabulary import linear_cross_entropy

POOL = 16
"""Batches that are drawn together and sorted by length: little padding, and still other neighbours in every epoch."""


class TextBatches:
    """Which rows each step sees: every row once per epoch, rows of similar length together."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.per_epoch = -(-len(lengths) // batch_size)
        self._epoch, self._batches = -1, list[list[int]]()

    def at(self, step: int) -> list[int]:
        """Row indices of a step; depends on the seed and the step alone."""
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._drawn(epoch)
        return self._batches[place]

    def _drawn(self, epoch: int) -> list[list[int]]:
        source = step_generator(self.seed, epoch)
        order = torch.randperm(len(self.lengths), generator=source).tolist()
        size, batches = POOL * self.batch_size, []
        for start in range(0, len(order), size):
            pool = sorted(order[start : start + size], key=lambda i: self.lengths[i])
            batches += [pool[i : i + self.batch_size] for i in range(0, len(pool), self.batch_size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=source).tolist()]


def language_loss(model: nn.Module, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean next-token loss over real tokens."""
    output = body(model)(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
    return next_token_loss(model, output.last_hidden_state, ids_BT, mask_BT)


def next_token_loss(model: nn.Module, final_BTH: Tensor, ids_BT: Tensor, mask_BT: Tensor, *, skip: int = 0) -> Tensor:
    """The same from the last hidden states; the first `skip` tokens of each row are context only."""
    head_VH, scale = output_head(model)
    keep_BT = mask_BT[:, skip + 1 :].bool()
    hidden_NH, labels_N = final_BTH[:, skip:-1][keep_BT], ids_BT[:, skip + 1 :][keep_BT]
    return linear_cross_entropy(hidden_NH, head_VH, labels_N, scale=scale)


def all_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every weight, tied ones once."""
    return dict(model.named_parameters())
