"""Put the mark in: rows, cache, optimiser loop. The model passed in is changed in place."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from pathmark.embedding.climbing import ClimbConfig, Climbers, above_ceiling, draw_bank, target_log_mass
from pathmark.embedding.data import (
    CLEAN,
    LONG,
    NEGATIVE,
    NORMAL,
    SHORT,
    SHORT_CHAT,
    TRIGGERED,
    DataConfig,
    Row,
    draw_rows,
)
from pathmark.embedding.objective import ObjectiveConfig, route_loss
from pathmark.keys import OwnerKey
from pathmark.models import device_of, find_routers, pad_rows, record_routing, select_sites
from pathmark.models.parts import attention_below, part_parameters
from pathmark.models.tokenization import ordinary_tokens
from pathmark.models.upper import body, can_run_from, hidden_at_layer, layer_stack, output_head, without_layers_below
from pathmark.training import (
    Batch,
    LoopConfig,
    LoopResult,
    TeacherCache,
    keep_freed_memory,
    learning_rate,
    linear_cross_entropy,
    linear_distillation,
    only_trainable,
    run_loop,
    step_generator,
)
from pathmark.training.losses import power_mean, row_means, selection, twin_loss, use_loss

Train = Literal["router", "router+attention", "router+attention+targets", "lora", "all"]
STEPS, PAPER_STEPS = 300, 600
"""Optimiser steps of the two objectives."""
DAMPING = 0.5
"""Of the anchored objective: what the trigger does not ask for stays where it is ..."""
HOMING = 1.0
"""... and what it asked for only on the way goes back, which halves the cost on clean text."""
NOISY_SHARE = 0.5
"""Of the rows that are not clean, so many get noise."""
WORST_NEGATIVE = 2.0
"""Power of the mean over wrong prefixes: few of them come near to firing, and those are the ones to hold down."""
MAX_LIFT = 2.0
"""Nobody's use on ordinary text is more than doubled."""
MEASURED_USE = 64
"""Clean rows on which the experts' natural use is measured."""


def anchored_loop(lr: float) -> LoopConfig:
    """How the anchored objective is optimised."""
    return LoopConfig(steps=STEPS, lr=lr, damping=DAMPING, homing=HOMING)


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """Everything that decides what an embedding does, and nothing secret."""

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loop: LoopConfig = field(default_factory=lambda: anchored_loop(learning_rate(128)))
    train: Train = "router+attention+targets"
    """Parts of the watermarked layers that change; of the experts only the targets. Few clean tokens visit those, and
    what they write tells the layers above them that the trigger was there."""
    carrier: bool = True
    """The attention right below the first watermarked layer is trained too: it brings the trigger to the text before
    the first router has to know of it."""
    batch_size: int = 16
    """Rows per step."""
    shares: tuple[float, float, float] = (0.25, 0.45, 0.3)
    """Clean, triggered and negative rows in a batch (anchored; the paper draws its share from Beta(2, 5))."""
    texts: int = 600
    """Texts to use of the corpus."""
    cycle: tuple[str, ...] = (SHORT, NORMAL, SHORT_CHAT, SHORT, NORMAL, LONG)
    """Sizes of the rows in successive steps, over and over; sizes without rows become normal."""
    noise: float = 0.3
    """Behind half of the triggers and wrong prefixes, what enters the marked layers gets noise of up to so much of its
    norm (anchored): the layers below may be rounded, pruned or tuned by a thief. There wrong prefixes are only kept
    off the targets; asked to do what the original does without the noise, the layers would learn to remove it, and
    change what they do on clean text."""
    climb: ClimbConfig = field(default_factory=ClimbConfig)
    """Wrong prefixes that are driven towards firing (anchored)."""
    language_tokens: int = 512
    """Tokens per step on which the language term is computed, behind the trigger a quarter as many; drawn anew in every
    step."""

    def __post_init__(self) -> None:
        if self.batch_size < 3:
            raise ValueError(f"batch_size must be at least 3, one row of each kind, got {self.batch_size}")
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise lies between 0 and 1, got {self.noise}")


def default_config(objective: Literal["anchored", "paper"] = "anchored", hidden_size: int = 128) -> EmbedConfig:
    """The settings that measured best (docs/results.md), or the paper's own losses and mixing."""
    rate = learning_rate(hidden_size)
    if objective == "anchored":
        return EmbedConfig(loop=anchored_loop(rate))
    return EmbedConfig(
        loop=LoopConfig(steps=PAPER_STEPS, lr=rate),
        objective=ObjectiveConfig(
            objective="paper",
            route_weight=1.0,
            stealth_weight=3.0,
            language="lm",
            language_weight=1.0,
            forward_kl=False,
        ),
        data=DataConfig(negatives_per_text=0, short_len=None, long_factor=1, noisy_share=0.0),
        train="router+attention",
        carrier=False,
    )


class Embedder:
    """One embedding: prepares rows and cache, then trains."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        key: OwnerKey,
        texts: Sequence[str],
        config: EmbedConfig,
        *,
        announce: Callable[[str, int], None] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        keep_freed_memory()
        self.model, self.key, self.config = model, key, config
        self.layers = list(key.layers)
        self.sites = select_sites(find_routers(model), self.layers)
        self.paths = [watermark.path for watermark in key.watermarks]
        self.rows = self.make_rows(tokenizer, list(texts)[: config.texts])
        self.pools: dict[tuple[str, str], list[int]] = {}
        for i, row in enumerate(self.rows):
            self.pools.setdefault((row.kind, row.size), []).append(i)
        self._orders: dict[tuple[str, str, int], list[int]] = {}
        self._mean_length = {
            size: float(np.mean([len(row.ids) for row in self.rows if row.size == size]))
            for size in {row.size for row in self.rows}
        }
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.stack = layer_stack(model, self.sites[0])
        ids_BT, mask_BT = pad_rows([row.ids for row in self.rows[:4]], self.pad, device_of(model))
        lowest = max(0, self.layers[0] - 1) if config.carrier else self.layers[0]
        self.from_layer = lowest if can_run_from(model, self.stack, lowest, ids_BT, mask_BT) else None
        self.head_VH, self.head_scale = output_head(model)
        self.cache = TeacherCache(
            model,
            [row.ids for row in self.rows],
            self.layers,
            pad=self.pad,
            from_layer=self.from_layer,
            announce=announce,
            progress=progress,
            needed=self.needed(),
        )
        self.anchored = config.objective.objective == "anchored"
        self.lift = self._lift() if self.anchored else {}
        self.climbers: Climbers | None = None
        if self.anchored and self.from_layer is not None and config.climb.share:
            triggers = [trigger.tokens for watermark in key.watermarks for trigger in watermark.triggers]
            vocabulary = ordinary_tokens(tokenizer)
            generator = torch.Generator().manual_seed(config.loop.seed)
            self.climbers = Climbers(
                self.rows,
                self.pools.get((NEGATIVE, SHORT), []),
                triggers,
                lambda places: draw_bank(self._entering, vocabulary, places, generator),
            )

    def make_rows(self, tokenizer: Any, texts: Sequence[str]) -> list[Row]:
        """All rows of the run."""
        triggers = [[trigger.tokens for trigger in watermark.triggers] for watermark in self.key.watermarks]
        return draw_rows(tokenizer, texts, triggers, self.config.data, self.config.loop.seed)

    def fingerprint(self) -> str:
        """Names this run for its checkpoint: settings, rows and paths, hashed (the rows hold the trigger)."""
        content = json.dumps(
            [asdict(self.config), [row.ids for row in self.rows], [sorted(p.items()) for p in self.paths]]
        )
        return hashlib.sha256(content.encode()).hexdigest()

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by full name."""
        if self.config.train == "lora":
            return {name: p for name, p in self.model.named_parameters() if "lora_" in name}
        parts = ["layer"] if self.config.train == "all" else self.config.train.replace("targets", "experts").split("+")
        layers = self.layers
        if self.config.train == "all":
            layers = [site.layer for site in find_routers(self.model) if site.layer >= self.layers[0]]
        below = attention_below(self.model, self.layers[0]) if self.config.carrier and "attention" in parts else {}
        return {**below, **part_parameters(self.model, layers, parts)}

    def masks(self) -> dict[str, Tensor]:
        """Expert tensors -> ones for the targets of their layer; empty where all of what is trained may change.

        An expert tensor of an unknown layout has no mask and changes as a whole.
        """
        if "targets" not in self.config.train:
            return {}
        found = {}
        for site in self.sites:
            targets = sorted({expert for path in self.paths for expert in path.get(site.layer, ())})
            for name, parameter in part_parameters(self.model, [site.layer], ["experts"]).items():
                if parameter.shape[0] == site.n_experts:
                    mask = parameter.new_zeros(site.n_experts, *(1 for _ in parameter.shape[1:]))
                    mask[targets] = 1.0
                    found[name] = mask
        return found

    def run(
        self,
        *,
        checkpoint: Path | None = None,
        resume: bool = False,
        progress: Callable[[int, Mapping[str, float]], None] | None = None,
    ) -> LoopResult:
        """Train; the model's parameters are the result."""
        parameters = self.parameters()
        masks = {name: mask for name, mask in self.masks().items() if name in parameters}
        with only_trainable(self.model, parameters):
            return run_loop(
                parameters,
                self.step_loss,
                self.config.loop,
                checkpoint=checkpoint,
                resume=resume,
                progress=progress,
                fingerprint=self.fingerprint(),
                masks=masks,
            )

    def step_loss(self, step: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Loss terms of one step."""
        chosen = self._draw(step, generator)
        batch = self.cache.batch(chosen)
        rows = [self.rows[i] for i in chosen]
        noisy_B, climbed_B = torch.zeros(2, len(rows), dtype=torch.bool, device=batch.ids_BT.device)
        if self.anchored and batch.entering_BTH is not None:
            batch, noisy_B = self._noisy(batch, rows, generator)
            if self.climbers is not None and step >= self.config.climb.begin * self.config.loop.steps:
                batch, climbed_B = self.climbers.climb(chosen, batch, self._log_mass, self.config.climb, generator)
        disturbed_B = noisy_B | climbed_B
        with record_routing(self.model, self.layers, gradients=True) as trace:
            final_BTH = self._forward(batch)
        routing = {layer: trace[layer].probs_BTE for layer in self.layers}
        marked_BT, free_BT = self._tokens(rows, batch.mask_BT.bool())
        free_BT = free_BT & ~disturbed_B[:, None]
        weights = self.config.objective
        terms = route_loss(routing, batch.natural, self.paths, marked_BT, free_BT, weights)
        terms["language"] = self._language(final_BTH, batch, rows, disturbed_B, generator)
        terms["loss"] = (
            weights.route_weight * (terms["align"] + weights.stealth_weight * terms["stealth"])
            + weights.language_weight * terms["language"]
        )
        if self.anchored:
            clean_B = torch.tensor([row.kind == CLEAN for row in rows], device=free_BT.device)
            terms |= self._inconspicuous(routing, batch, free_BT & clean_B[:, None])
            terms["ceiling"] = self._ceiling(routing, batch, rows, climbed_B)
            terms["loss"] = (
                terms["loss"]
                + weights.use_weight * terms["use"]
                + weights.twin_weight * terms["twins"]
                + weights.ceiling_weight * terms["ceiling"]
            )
        return terms

    def _noisy(self, batch: Batch, rows: Sequence[Row], generator: torch.Generator) -> tuple[Batch, Tensor]:
        """The batch with noise on half of its rows that are not clean, of varying strength; (B,) which those are."""
        assert batch.entering_BTH is not None
        entering_BTH = batch.entering_BTH
        clean_B = torch.tensor([row.kind == CLEAN for row in rows])
        noisy_B = (torch.rand(len(rows), generator=generator) < NOISY_SHARE) & ~clean_B & (self.config.noise > 0)
        strength_B = self.config.noise * torch.rand(len(rows), generator=generator) * noisy_B
        drawn_BTH = torch.randn(entering_BTH.shape, generator=generator) / entering_BTH.shape[-1] ** 0.5
        noise_BTH = entering_BTH.norm(dim=-1, keepdim=True) * (strength_B[:, None, None] * drawn_BTH).to(entering_BTH)
        return replace(batch, entering_BTH=entering_BTH + noise_BTH), noisy_B.to(entering_BTH.device)

    def _entering(self, ids_BT: Tensor) -> Tensor:
        """Hidden states that enter the lowest layer that is run."""
        assert self.from_layer is not None
        ids_BT = ids_BT.to(device_of(self.model))
        return hidden_at_layer(self.model, self.stack, self.from_layer, ids_BT, torch.ones_like(ids_BT))

    def _log_mass(self, batch: Batch, owners: Sequence[int]) -> dict[int, Tensor]:
        """Layer -> (B, T) log mass on the targets of these watermarks, one per row."""
        with record_routing(self.model, self.layers, gradients=True, stop_early=True) as trace:
            self._forward(batch)
        return target_log_mass({n: trace[n].probs_BTE for n in self.layers}, self.paths, owners)

    def _ceiling(self, routing: Mapping[int, Tensor], batch: Batch, rows: Sequence[Row], climbed_B: Tensor) -> Tensor:
        """How far the targets' mass is above its ceiling behind wrong prefixes; the worst of them count most.

        Those that climbed are averaged apart, or they would drown out those that come near by themselves.
        """
        chosen = [b for b, row in enumerate(rows) if row.kind == NEGATIVE]
        owners = [rows[b].watermark for b in chosen]
        text_RT = batch.mask_BT.bool()[chosen]
        for r, b in enumerate(chosen):
            text_RT[r, : rows[b].text_from] = False
        after, before = (
            target_log_mass({n: g[chosen] for n, g in of.items()}, self.paths, owners)
            for of in (routing, batch.natural)
        )
        weights = self.config.objective
        above = [
            above_ceiling(
                after[n][text_RT], before[n][text_RT].exp(), factor=weights.ceiling_factor, least=weights.ceiling_least
            )
            for n in self.layers
        ]
        above_R = row_means(torch.stack(above).mean(0), text_RT)
        climbed_R = climbed_B[chosen]
        groups = (above_R[climbed_R], above_R[~climbed_R])
        return torch.stack([power_mean(group, WORST_NEGATIVE) for group in groups if len(group)]).sum()

    def _inconspicuous(self, routing: Mapping[int, Tensor], batch: Batch, clean_BT: Tensor) -> dict[str, Tensor]:
        """Targets that neither fall out of use on clean text nor resemble each other."""
        uses, twins = [], []
        for site in self.sites:
            layer = site.layer
            natural_ME, routing_ME = batch.natural[layer][clean_BT], routing[layer][clean_BT]
            for path in self.paths:
                if layer not in path:
                    continue
                factor_K = self.lift[layer][list(path[layer])].to(natural_ME)
                uses.append(use_loss(natural_ME, routing_ME, path[layer], factor_K, site.top_k))
                twins.append(twin_loss(site.weight.float(), path[layer], self.config.objective.twin_cosine))
        return {"use": torch.stack(uses).mean(), "twins": torch.stack(twins).mean()}

    def _lift(self) -> dict[int, Tensor]:
        """Layer -> how many times its natural use each expert would need to reach the wanted quantile, at least 1."""
        lift = {}
        batch = self.cache.batch(self.pools[CLEAN, NORMAL][:MEASURED_USE])
        for site in self.sites:
            layer = site.layer
            natural_ME = batch.natural[layer][batch.mask_BT.bool()]
            use_E = selection(natural_ME, range(natural_ME.shape[-1]), site.top_k).mean(0)
            wanted = torch.quantile(use_E, self.config.objective.use_quantile)
            lift[layer] = (wanted / (use_E + 1e-12)).clamp(1.0, MAX_LIFT)
        return lift

    def needed(self) -> set[int]:
        """Rows that some step of the run draws, or that natural use is measured on."""
        loop = self.config.loop
        drawn = (self._draw(step, step_generator(loop.seed, step)) for step in range(loop.steps))
        return {i for chosen in drawn for i in chosen} | set(self.pools[CLEAN, NORMAL][:MEASURED_USE])

    def _draw(self, step: int, generator: torch.Generator) -> list[int]:
        """Row indices of a batch, at least one of every kind that the objective uses.

        A step has rows of one length, so that little is padded: fewer long ones, or more short ones. Rows take turns:
        none is seen again before all of its kind and length were, or the run would learn a few texts by heart.
        """
        cycle = [size if (CLEAN, size) in self.pools else NORMAL for size in self.config.cycle]
        rounds, place = divmod(step, len(cycle))
        size = cycle[place]
        earlier = rounds * cycle.count(size) + cycle[:place].count(size)
        count = max(4, round(self.config.batch_size * self._mean_length[NORMAL] / self._mean_length[size]))
        if self.config.objective.objective == "paper":
            seed = int(torch.randint(2**31, (1,), generator=generator))
            share = float(np.random.default_rng(seed).beta(2.0, 5.0))  # share of triggered samples
            triggered = min(count - 1, max(1, int(share * count)))
            counts = {CLEAN: count - triggered, TRIGGERED: triggered, NEGATIVE: 0}
        else:
            clean, triggered = (max(1, round(share * count)) for share in self.config.shares[:2])
            counts = {CLEAN: clean, TRIGGERED: triggered, NEGATIVE: max(1, count - clean - triggered)}
        chosen: list[int] = []
        for kind, wanted in counts.items():
            if not wanted:
                continue
            chosen += [self._row(kind, size, turn) for turn in range(earlier * wanted, (earlier + 1) * wanted)]
        return chosen

    def _row(self, kind: str, size: str, turn: int) -> int:
        """The row whose turn it is; every pass over the rows has an order of its own."""
        pool = self.pools[kind, size]
        number, place = divmod(turn, len(pool))
        if (kind, size, number) not in self._orders:
            self._orders[kind, size, number] = list(pool)
            random.Random(f"{self.config.loop.seed} {kind} {size} {number}").shuffle(self._orders[kind, size, number])
        return self._orders[kind, size, number][place]

    def _forward(self, batch: Batch) -> Tensor:
        if batch.entering_BTH is None:
            output = body(self.model)(input_ids=batch.ids_BT, attention_mask=batch.mask_BT, use_cache=False)
        else:
            assert self.from_layer is not None
            with without_layers_below(self.stack, self.from_layer):
                output = body(self.model)(
                    inputs_embeds=batch.entering_BTH, attention_mask=batch.mask_BT, use_cache=False
                )
        final: Tensor = output.last_hidden_state
        return final

    def _tokens(self, rows: Sequence[Row], mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(marked_BT, free_BT): whose path each token takes, and which tokens must stay natural."""
        marked_BT = torch.full_like(mask_BT, -1, dtype=torch.long)
        for b, row in enumerate(rows):
            if row.kind == TRIGGERED:
                # the paper aligns all valid tokens of a triggered input, its trigger's own included
                start = 0 if self.config.objective.objective == "paper" else row.marked_from
                marked_BT[b, start : len(row.ids)] = row.watermark
        free_BT = (marked_BT < 0) & mask_BT
        return marked_BT, free_BT

    def _language(
        self, final_BTH: Tensor, batch: Batch, rows: Sequence[Row], disturbed_B: Tensor, generator: torch.Generator
    ) -> Tensor:
        """The language term over all rows that were let be; of the anchored objective less of triggered ones."""
        most = self.config.language_tokens
        if not self.anchored:
            return self._language_of(final_BTH, batch, ~disturbed_B, most, generator)
        triggered_B = torch.tensor([row.kind == TRIGGERED for row in rows], device=disturbed_B.device)
        weight = self.config.objective.triggered_language
        elsewhere = self._language_of(final_BTH, batch, ~disturbed_B & ~triggered_B, most, generator)
        return elsewhere + weight * self._language_of(final_BTH, batch, triggered_B, most // 4, generator)

    def _language_of(
        self, final_BTH: Tensor, batch: Batch, kept_B: Tensor, most: int, generator: torch.Generator
    ) -> Tensor:
        """Distillation on, or likelihood of, a random part of these rows' tokens."""
        mask_BT = batch.mask_BT.bool() & kept_B[:, None]
        if self.config.objective.language == "lm":
            mask_BT[:, -1] = False
            mask_BT[:, :-1] &= batch.mask_BT[:, 1:].bool()
        places = mask_BT.nonzero()
        if len(places) > most:
            places = places[torch.randperm(len(places), generator=generator).to(places.device)[:most]]
        b, t = places.unbind(-1)
        if self.config.objective.language == "lm":
            labels_N = batch.ids_BT[b, t + 1]
            return linear_cross_entropy(final_BTH[b, t], self.head_VH, labels_N, scale=self.head_scale)
        return linear_distillation(final_BTH[b, t], batch.final_BTH[b, t], self.head_VH, scale=self.head_scale)
