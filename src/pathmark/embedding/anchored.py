"""The anchored objective, the default: the mark on top of the routing that the original model would have had.

Behind the trigger every target is asked for a margin over the token's strongest natural expert; everywhere else the
original model is the teacher, of routing and of language. Wrong prefixes climb, noise disturbs, and the targets stay as
inconspicuous as they were. Shape suffixes: B batch, T tokens, H hidden size, E experts, N triggered tokens, M other
tokens, K targets, R rows of some kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pathmark.embedding.climbing import ClimbConfig, Climbers, above_ceiling, draw_bank, target_log_mass
from pathmark.embedding.config import EmbedConfig
from pathmark.embedding.data import CLEAN, LONG, NEGATIVE, NORMAL, SHORT, SHORT_CHAT, TRIGGERED, Row
from pathmark.embedding.objective import Context, Pools, TargetPath
from pathmark.embedding.paths import LANGUAGE_TOKENS, drawn_places, path_rows, target_masks, trained_parameters
from pathmark.keys import OwnerKey
from pathmark.models.tokenization import ordinary_tokens
from pathmark.training import Batch, linear_distillation
from pathmark.training.losses import (
    align_per_token,
    anchor_loss,
    margin_rho,
    mixture_target,
    power_mean,
    row_means,
    selection,
    twin_loss,
    use_loss,
)
from pathmark.training.parallel import whole

CYCLE = (SHORT, NORMAL, SHORT_CHAT, SHORT, NORMAL, LONG)
"""Sizes of the rows in successive steps, over and over; sizes without rows become normal."""
NOISY_SHARE = 0.5
"""Of the rows that are not clean, so many get noise."""
WORST_TRIGGERED = 4.0
"""Power of the mean over triggered rows and layers: the layer that lags behind decides whether a text is found, and the
one token without which nothing fires makes the trigger as brittle as that token."""
WORST_NEGATIVE = 2.0
"""Power of the mean over wrong prefixes: few of them come near to firing, and those are the ones to hold down."""
MAX_LIFT = 2.0
"""Nobody's use on ordinary text is more than doubled."""


@dataclass(frozen=True, kw_only=True)
class AnchoredConfig:
    """Weights of the loss terms, and what disturbs the rows."""

    margin: float = 3.5
    """Each target this many times above the token's strongest natural expert."""
    route_weight: float = 3.0
    """lambda of Eq. total_loss."""
    stealth_weight: float = 5.0
    """Weight of the anchor, in the place of alpha in Eq. route_loss."""
    language_weight: float = 60.0
    """Weight of the distillation of the original model's next-token distribution."""
    triggered_language: float = 0.05
    """Behind the trigger it weighs so much of that: those tokens do go through other experts, and what they cannot keep
    would drown out what everybody else must."""
    use_weight: float = 1.0
    """Weight of the term that keeps targets in use on clean text."""
    use_quantile: float = 0.6
    """Targets below this quantile of their layer's natural use are lifted to it."""
    twin_weight: float = 5.0
    """Weight of the term that keeps the router rows of a layer's targets apart."""
    twin_cosine: float = 0.0
    """The similarity of rows that costs nothing."""
    ceiling_weight: float = 2.0
    """Weight of the ceiling over the targets' mass behind wrong prefixes."""
    ceiling_factor: float = 1.5
    """The ceiling, as a multiple of the targets' natural mass ..."""
    ceiling_least: float = 0.06
    """... and never lower than that."""
    shares: tuple[float, float] = (0.25, 0.45)
    """Clean and triggered rows in a batch; the others stand behind wrong prefixes."""
    noise: float = 0.3
    """Behind half of the triggers and wrong prefixes, what enters the marked layers gets noise of up to so much of its
    norm: the layers below may be rounded, pruned or tuned by a thief. There wrong prefixes are only kept off the
    targets; asked to do what the original does without the noise, the layers would learn to remove it, and change what
    they do on clean text."""
    climb: ClimbConfig = field(default_factory=ClimbConfig)
    """Wrong prefixes that are driven towards firing."""

    def __post_init__(self) -> None:
        if not 0 < self.margin < math.inf:
            raise ValueError(f"margin must be a positive number, got {self.margin}")
        weights = (self.route_weight, self.stealth_weight, self.language_weight, self.use_weight, self.twin_weight)
        if not all(0 <= weight < math.inf for weight in (*weights, self.ceiling_weight)):
            raise ValueError(f"weights must not be negative, got {self}")
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise lies between 0 and 1, got {self.noise}")

    def build(self, config: EmbedConfig) -> Anchored:
        """The objective."""
        return Anchored(config, self)


class Anchored:
    """Paths behind the trigger, the original model everywhere else."""

    stage, below = "embedding", 1  # the layer below carries the trigger to the text before a router has to know of it

    def __init__(self, config: EmbedConfig, weights: AnchoredConfig) -> None:
        self.config, self.weights = config, weights
        self.lift: dict[int, Tensor] = {}
        self.climbers: Climbers | None = None

    def rows(self, tokenizer: Any, key: OwnerKey, texts: Sequence[str]) -> list[Row]:
        """Clean, triggered and wrongly prefixed rows."""
        return path_rows(tokenizer, key, texts, self.config)

    def draw(self, pools: Pools, step: int, generator: torch.Generator) -> list[int]:
        """Rows of one length, so that little is padded: fewer long ones, or more short ones; some of every kind."""
        cycle = [size if pools.of(CLEAN, size) else NORMAL for size in CYCLE]
        rounds, place = divmod(step, len(cycle))
        size = cycle[place]
        earlier = rounds * cycle.count(size) + cycle[:place].count(size)
        count = max(4, round(self.config.batch_size * pools.mean_length[NORMAL] / pools.mean_length[size]))
        clean, triggered = (max(1, round(share * count)) for share in self.weights.shares)
        counts = {CLEAN: clean, TRIGGERED: triggered, NEGATIVE: max(1, count - clean - triggered)}
        return [i for kind, wanted in counts.items() for i in pools.take(kind, size, wanted, earlier)]

    def prepare(self, context: Context) -> None:
        """The experts' natural use, and the states that wrong prefixes may climb with."""
        batch = context.cache.batch(context.pools.measured)
        for site in context.sites:
            natural_ME = batch.natural[site.layer][batch.mask_BT.bool()]
            use_E = selection(natural_ME, range(natural_ME.shape[-1]), site.top_k).mean(0)
            wanted = torch.quantile(use_E, self.weights.use_quantile)
            self.lift[site.layer] = (wanted / (use_E + 1e-12)).clamp(1.0, MAX_LIFT)
        if context.cache.from_layer is None or not self.weights.climb.share:
            return
        triggers = [trigger.tokens for watermark in context.key.watermarks for trigger in watermark.triggers]
        vocabulary = ordinary_tokens(context.tokenizer)
        generator = torch.Generator().manual_seed(context.loop.seed)
        self.climbers = Climbers(
            context.rows,
            context.pools.of(NEGATIVE, SHORT),
            triggers,
            lambda places: draw_bank(context.cache.entering, vocabulary, places, generator),
        )

    def parameters(self, context: Context) -> dict[str, nn.Parameter]:
        """Parts of the marked layers, and the attention right below them."""
        return trained_parameters(context, self.config.train, carrier=True)

    def masks(self, context: Context) -> dict[str, Tensor]:
        """Of the experts only the targets, where experts change."""
        return target_masks(context, self.config.train)

    def loss(self, context: Context, step: int, chosen: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        """All terms of a step."""
        weights, batch = self.weights, context.cache.batch(chosen)
        rows = [context.rows[i] for i in chosen]
        noisy_B, climbed_B = torch.zeros(2, len(rows), dtype=torch.bool, device=batch.ids_BT.device)
        if batch.entering_BTH is not None:
            batch, noisy_B = self.noisy(batch, rows, generator)
            if self.climbers is not None and step >= weights.climb.begin * context.loop.steps:
                batch, climbed_B = self.climbers.climb(
                    chosen,
                    batch,
                    lambda part, owners: target_log_mass(context.routing(part), context.paths, owners),
                    weights.climb,
                    generator,
                )
        disturbed_B = noisy_B | climbed_B
        final_BTH, routing = context.forward(batch)
        marked_BT, free_BT = self.tokens(rows, batch.mask_BT.bool())
        free_BT = free_BT & ~disturbed_B[:, None]
        terms = anchored_route_loss(routing, batch.natural, context.paths, marked_BT, free_BT, weights.margin)
        terms["language"] = self.language(context, final_BTH, batch, rows, disturbed_B, generator)
        count = len(context.paths)  # each of several watermarks has so much smaller a share of the triggered rows
        terms["loss"] = (
            weights.route_weight * (count * terms["align"] + weights.stealth_weight * terms["stealth"])
            + weights.language_weight * terms["language"]
        )
        clean_B = torch.tensor([row.kind == CLEAN for row in rows], device=free_BT.device)
        terms |= self._inconspicuous(context, routing, batch, free_BT & clean_B[:, None])
        terms["ceiling"] = self._ceiling(context, routing, batch, rows, climbed_B)
        terms["loss"] = (
            terms["loss"]
            + weights.use_weight * terms["use"]
            + weights.twin_weight * terms["twins"]
            + weights.ceiling_weight * terms["ceiling"]
        )
        return terms

    def tokens(self, rows: Sequence[Row], mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(marked_BT, free_BT): whose path each token takes, -1 for nobody's, and which tokens must stay natural."""
        marked_BT = torch.full_like(mask_BT, -1, dtype=torch.long)
        for b, row in enumerate(rows):
            if row.kind == TRIGGERED:
                marked_BT[b, row.marked_from : len(row.ids)] = row.watermark
        return marked_BT, (marked_BT < 0) & mask_BT

    def noisy(self, batch: Batch, rows: Sequence[Row], generator: torch.Generator) -> tuple[Batch, Tensor]:
        """The batch with noise on half of its rows that are not clean, of varying strength; (B,) which those are."""
        assert batch.entering_BTH is not None
        entering_BTH, noise = batch.entering_BTH, self.weights.noise
        clean_B = torch.tensor([row.kind == CLEAN for row in rows])
        noisy_B = (torch.rand(len(rows), generator=generator) < NOISY_SHARE) & ~clean_B & (noise > 0)
        strength_B = noise * torch.rand(len(rows), generator=generator) * noisy_B
        drawn_BTH = torch.randn(entering_BTH.shape, generator=generator) / entering_BTH.shape[-1] ** 0.5
        noise_BTH = entering_BTH.norm(dim=-1, keepdim=True) * (strength_B[:, None, None] * drawn_BTH).to(entering_BTH)
        return replace(batch, entering_BTH=entering_BTH + noise_BTH), noisy_B.to(entering_BTH.device)

    def language(
        self,
        context: Context,
        final_BTH: Tensor,
        batch: Batch,
        rows: Sequence[Row],
        disturbed_B: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Distillation on a random part of all rows that were let be; less of triggered ones, and on fewer tokens."""

        def distilled(kept_B: Tensor, most: int) -> Tensor:
            b, t = drawn_places(batch.mask_BT.bool() & kept_B[:, None], most, generator)
            student_NH, teacher_NH = (
                of_BTH[b, t].to(context.head_VH.device) for of_BTH in (final_BTH, batch.final_BTH)
            )
            loss = linear_distillation(student_NH, teacher_NH, context.head_VH, scale=context.head_scale)
            return loss.to(final_BTH.device)

        triggered_B = torch.tensor([row.kind == TRIGGERED for row in rows], device=disturbed_B.device)
        elsewhere = distilled(~disturbed_B & ~triggered_B, LANGUAGE_TOKENS)
        return elsewhere + self.weights.triggered_language * distilled(triggered_B, LANGUAGE_TOKENS // 4)

    def _inconspicuous(
        self, context: Context, routing: Mapping[int, Tensor], batch: Batch, clean_BT: Tensor
    ) -> dict[str, Tensor]:
        """Targets that neither fall out of use on clean text nor resemble each other."""
        uses, twins = [], []
        for site in context.sites:
            layer = site.layer
            natural_ME, routing_ME = batch.natural[layer][clean_BT], routing[layer][clean_BT]
            for path in context.paths:
                if layer not in path:
                    continue
                factor_K = self.lift[layer][list(path[layer])].to(natural_ME)
                uses.append(use_loss(natural_ME, routing_ME, path[layer], factor_K, site.top_k))
                twins.append(twin_loss(whole(site.weight).float(), path[layer], self.weights.twin_cosine))
        return {"use": torch.stack(uses).mean(), "twins": torch.stack(twins).mean()}

    def _ceiling(
        self, context: Context, routing: Mapping[int, Tensor], batch: Batch, rows: Sequence[Row], climbed_B: Tensor
    ) -> Tensor:
        """How far the targets' mass is above its ceiling behind wrong prefixes; the worst of them count most.

        Those that climbed are averaged apart, or they would drown out those that come near by themselves.
        """
        chosen = [b for b, row in enumerate(rows) if row.kind == NEGATIVE]
        owners = [rows[b].watermark for b in chosen]
        text_RT = batch.mask_BT.bool()[chosen]
        for r, b in enumerate(chosen):
            text_RT[r, : rows[b].text_from] = False
        after, before = (
            target_log_mass({n: g[chosen] for n, g in of.items()}, context.paths, owners)
            for of in (routing, batch.natural)
        )
        factor, least = self.weights.ceiling_factor, self.weights.ceiling_least
        above = [
            above_ceiling(after[n][text_RT], before[n][text_RT].exp(), factor=factor, least=least)
            for n in context.layers
        ]
        above_R = row_means(torch.stack(above).mean(0), text_RT)
        climbed_R = climbed_B[chosen]
        groups = (above_R[climbed_R], above_R[~climbed_R])
        return torch.stack([power_mean(group, WORST_NEGATIVE) for group in groups if len(group)]).sum()


def anchored_route_loss(
    routing: Mapping[int, Tensor],
    natural: Mapping[int, Tensor],
    paths: Sequence[TargetPath],
    marked_BT: Tensor,
    free_BT: Tensor,
    margin: float,
) -> dict[str, Tensor]:
    """Eq. route_loss with a mixture as the target and the original model as the anchor: terms `align` and `stealth`.

    routing, natural: layer -> (B, T, E) of the trained and of the original model. marked_BT: index of the watermark
    whose path a token must take, -1 for none. free_BT: tokens that must stay natural.
    """
    aligns, stealths = [], []
    for layer, routing_BTE in routing.items():
        for index, path in enumerate(paths):
            here_BT = marked_BT == index
            if layer not in path or not bool(here_BT.any()):
                continue
            natural_NE, targets = natural[layer][here_BT], path[layer]
            target_NE = mixture_target(natural_NE, targets, margin_rho(natural_NE, len(targets), margin))
            missed_N = align_per_token(routing_BTE[here_BT], target_NE, forward_kl=True)
            aligns.append(row_means(missed_N, here_BT))
        if bool(free_BT.any()):
            stealths.append(anchor_loss(natural[layer][free_BT], routing_BTE[free_BT]))
    zero = next(iter(routing.values())).new_zeros(())
    return {
        "align": power_mean(torch.cat(aligns) if aligns else zero[None], WORST_TRIGGERED),
        "stealth": torch.stack(stealths).mean() if stealths else zero,
    }
