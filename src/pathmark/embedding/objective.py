"""From the routing of a batch to one number: the paper's objective, and the anchored one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pathmark.training.losses import (
    align_loss,
    align_per_token,
    anchor_loss,
    contrast_loss,
    margin_rho,
    mixture_target,
    paper_target,
    power_mean,
    row_means,
)

WORST_TRIGGERED = 4.0
"""Power of the mean over triggered rows and layers: the layer that lags behind decides whether a text is found, and the
one token without which nothing fires makes the trigger as brittle as that token."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Weights of the loss terms."""

    objective: Literal["anchored", "paper"] = "anchored"
    """`anchored` keeps natural routing by the original model; `paper` is Algorithm 1 as printed."""
    margin: float = 3.5
    """Each target this many times above the token's strongest natural expert (anchored)."""
    route_weight: float = 3.0
    """lambda of Eq. total_loss (paper: 1)."""
    stealth_weight: float = 5.0
    """alpha of Eq. route_loss (paper: 3), or the weight of the anchor (anchored)."""
    temperature: float = 1.0
    """tau_T of Eq. infonce (paper)."""
    language: Literal["distill", "lm"] = "distill"
    """What keeps the language: the original model's next-token distribution, or the text itself."""
    language_weight: float = 60.0
    """Weight of that term (Eq. total_loss has 1)."""
    triggered_language: float = 0.05
    """Behind the trigger it weighs so much of that (anchored): those tokens do go through other experts, and what they
    cannot keep would drown out what everybody else must."""
    forward_kl: bool = True
    """KL(p* || g) in the alignment; False is the printed KL(g || p*)."""

    use_weight: float = 1.0
    """Weight of the term that keeps targets in use on clean text (anchored)."""
    use_quantile: float = 0.6
    """Targets below this quantile of their layer's natural use are lifted to it."""
    twin_weight: float = 5.0
    """Weight of the term that keeps the router rows of a layer's targets apart (anchored)."""
    twin_cosine: float = 0.0
    """The similarity of rows that costs nothing."""
    ceiling_weight: float = 2.0
    """Weight of the ceiling over the targets' mass behind prefixes that climbed (anchored)."""
    ceiling_factor: float = 1.5
    """The ceiling, as a multiple of the targets' natural mass ..."""
    ceiling_least: float = 0.06
    """... and never lower than that."""

    def __post_init__(self) -> None:
        if not 0 < self.margin < math.inf:
            raise ValueError(f"margin must be a positive number, got {self.margin}")
        weights = (self.route_weight, self.stealth_weight, self.language_weight, self.use_weight, self.twin_weight)
        weighed = all(0 <= weight < math.inf for weight in (*weights, self.ceiling_weight))
        if not weighed or not 0 < self.temperature < math.inf:
            raise ValueError(f"weights must not be negative and the temperature positive, got {self}")


def route_loss(
    routing: Mapping[int, Tensor],
    natural: Mapping[int, Tensor],
    paths: Sequence[Mapping[int, Sequence[int]]],
    marked_BT: Tensor,
    free_BT: Tensor,
    config: ObjectiveConfig,
) -> dict[str, Tensor]:
    """Eq. route_loss over all watermarks and their layers: terms `align` and `stealth`.

    routing, natural: layer -> (B, T, E) of the trained and of the original model. marked_BT: index of the
    watermark whose path a token must take, -1 for none. free_BT: tokens that must stay natural.
    """
    aligns, stealths = [], []
    for layer, routing_BTE in routing.items():
        free_ME = routing_BTE[free_BT]
        for index, path in enumerate(paths):
            here_BT = marked_BT == index
            if layer not in path or not bool(here_BT.any()):
                continue
            marked_NE, targets = routing_BTE[here_BT], path[layer]
            if config.objective == "paper":
                target_E = paper_target(targets, routing_BTE.shape[-1]).to(routing_BTE)
                aligns.append(align_loss(marked_NE, target_E, forward_kl=config.forward_kl)[None])
                if len(free_ME):
                    stealths.append(contrast_loss(marked_NE, free_ME, target_E, temperature=config.temperature))
            else:
                natural_NE = natural[layer][here_BT]
                rho_N1 = margin_rho(natural_NE, len(targets), config.margin)
                target_NE = mixture_target(natural_NE, targets, rho_N1)
                missed_N = align_per_token(marked_NE, target_NE, forward_kl=config.forward_kl)
                aligns.append(row_means(missed_N, here_BT))
        if config.objective == "anchored" and len(free_ME):
            stealths.append(anchor_loss(natural[layer][free_BT], free_ME))
    zero = next(iter(routing.values())).new_zeros(())
    aligned = torch.cat(aligns) if aligns else zero[None]
    return {
        "align": aligned.mean() if config.objective == "paper" else power_mean(aligned, WORST_TRIGGERED),
        "stealth": torch.stack(stealths).mean() if stealths else zero,
    }
