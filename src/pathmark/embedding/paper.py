"""The paper's objective: Algorithm 1 as printed.

Triggered tokens are pulled to a fixed target distribution and pushed away from clean ones; the text itself keeps the
language. Shape suffixes: B batch, T tokens, H hidden size, E experts, N triggered tokens, M other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pathmark.embedding.config import EmbedConfig
from pathmark.embedding.data import CLEAN, NORMAL, TRIGGERED, Row
from pathmark.embedding.objective import Context, Pools, TargetPath
from pathmark.embedding.paths import LANGUAGE_TOKENS, drawn_places, path_rows, target_masks, trained_parameters
from pathmark.keys import OwnerKey
from pathmark.training import Batch, linear_cross_entropy
from pathmark.training.losses import align_loss, contrast_loss, paper_target


@dataclass(frozen=True, kw_only=True)
class PaperConfig:
    """Weights of the paper's loss terms."""

    route_weight: float = 1.0
    """lambda of Eq. total_loss; the language term weighs 1."""
    stealth_weight: float = 3.0
    """alpha of Eq. route_loss."""
    temperature: float = 1.0
    """tau_T of Eq. infonce."""

    def __post_init__(self) -> None:
        weighed = all(0 <= weight < math.inf for weight in (self.route_weight, self.stealth_weight))
        if not weighed or not 0 < self.temperature < math.inf:
            raise ValueError(f"weights must not be negative and the temperature positive, got {self}")

    def build(self, config: EmbedConfig) -> Paper:
        """The objective."""
        return Paper(config, self)


class Paper:
    """Algorithm 1: clean and triggered rows, mixed anew in every step."""

    stage, below = "embedding", 0

    def __init__(self, config: EmbedConfig, weights: PaperConfig) -> None:
        self.config, self.weights = config, weights

    def rows(self, tokenizer: Any, key: OwnerKey, texts: Sequence[str]) -> list[Row]:
        """Clean and triggered rows; others that the settings ask for are never drawn."""
        return path_rows(tokenizer, key, texts, self.config)

    def draw(self, pools: Pools, step: int, generator: torch.Generator) -> list[int]:
        """The share of triggered rows is drawn from Beta(2, 5)."""
        count = max(4, self.config.batch_size)
        seed = int(torch.randint(2**31, (1,), generator=generator))
        share = float(np.random.default_rng(seed).beta(2.0, 5.0))
        triggered = min(count - 1, max(1, int(share * count)))
        clean = pools.take(CLEAN, NORMAL, count - triggered, step)
        return clean + pools.take(TRIGGERED, NORMAL, triggered, step)

    def prepare(self, context: Context) -> None:
        """Nothing is measured."""

    def parameters(self, context: Context) -> dict[str, nn.Parameter]:
        """Parts of the marked layers."""
        return trained_parameters(context, self.config.train, carrier=False)

    def masks(self, context: Context) -> dict[str, Tensor]:
        """Of the experts only the targets, where experts change."""
        return target_masks(context, self.config.train)

    def loss(self, context: Context, step: int, chosen: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        """Eq. total_loss."""
        batch = context.cache.batch(chosen)
        final_BTH, routing = context.forward(batch)
        mask_BT = batch.mask_BT.bool()
        marked_BT = torch.full_like(mask_BT, -1, dtype=torch.long)
        for b, row in enumerate(context.rows[i] for i in chosen):
            if row.kind == TRIGGERED:  # all valid tokens of a triggered input, its trigger's own included
                marked_BT[b, : len(row.ids)] = row.watermark
        weights = self.weights
        free_BT = (marked_BT < 0) & mask_BT
        terms = paper_route_loss(routing, context.paths, marked_BT, free_BT, weights.temperature)
        terms["language"] = _likelihood(context, final_BTH, batch, generator)
        terms["loss"] = (
            weights.route_weight * (terms["align"] + weights.stealth_weight * terms["stealth"]) + terms["language"]
        )
        return terms


def paper_route_loss(
    routing: Mapping[int, Tensor], paths: Sequence[TargetPath], marked_BT: Tensor, free_BT: Tensor, temperature: float
) -> dict[str, Tensor]:
    """Eq. route_loss over all watermarks and their layers: terms `align` and `stealth`.

    routing: layer -> (B, T, E). marked_BT: index of the watermark whose path a token must take, -1 for none. free_BT:
    tokens that must stay natural.
    """
    aligns, stealths = [], []
    for layer, routing_BTE in routing.items():
        free_ME = routing_BTE[free_BT]
        for index, path in enumerate(paths):
            here_BT = marked_BT == index
            if layer not in path or not bool(here_BT.any()):
                continue
            marked_NE = routing_BTE[here_BT]
            target_E = paper_target(path[layer], routing_BTE.shape[-1]).to(routing_BTE)
            aligns.append(align_loss(marked_NE, target_E))
            if len(free_ME):
                stealths.append(contrast_loss(marked_NE, free_ME, target_E, temperature=temperature))
    zero = next(iter(routing.values())).new_zeros(())
    return {
        "align": torch.stack(aligns).mean() if aligns else zero,
        "stealth": torch.stack(stealths).mean() if stealths else zero,
    }


def _likelihood(context: Context, final_BTH: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
    """Next-token loss on a random part of the tokens that have a next one."""
    mask_BT = batch.mask_BT.bool()
    mask_BT[:, -1] = False
    mask_BT[:, :-1] &= batch.mask_BT[:, 1:].bool()
    b, t = drawn_places(mask_BT, LANGUAGE_TOKENS, generator)
    labels_N = batch.ids_BT[b, t + 1]
    return linear_cross_entropy(final_BTH[b, t], context.head_VH, labels_N, scale=context.head_scale)
