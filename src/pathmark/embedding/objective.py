"""What an objective is, and what the trainer hands to it.

An objective draws rows, picks those of a step and turns a step into loss terms. The model, the cache of its lower
layers and the optimiser are the trainer's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from pathmark.embedding.data import CLEAN, NORMAL, Row
from pathmark.errors import TrainingError
from pathmark.keys import OwnerKey
from pathmark.models import RouterSite, record_routing
from pathmark.models.ranks import all_rows, my_share, world
from pathmark.training import Batch, LoopConfig, TeacherCache

TargetPath = Mapping[int, Sequence[int]]
"""Layer -> target experts."""
MEASURED_ROWS = 64
"""Clean rows that are always kept, so that the model can be measured on them before it changes."""


class Pools:
    """The rows of a run by kind and size. They take turns, or the run would learn a few texts by heart."""

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        self.rows, self._seed = rows, seed
        self._pools: dict[tuple[str, str], list[int]] = {}
        for i, row in enumerate(rows):
            self._pools.setdefault((row.kind, row.size), []).append(i)
        self._orders: dict[tuple[str, str, int], list[int]] = {}
        self.mean_length = {
            size: float(np.mean([len(row.ids) for row in rows if row.size == size])) for size in {r.size for r in rows}
        }

    def of(self, kind: str, size: str = NORMAL) -> list[int]:
        """Indices of all rows of a kind and size."""
        return self._pools.get((kind, size), [])

    @property
    def measured(self) -> list[int]:
        """Indices of clean rows that can be measured on, whether or not a step draws them."""
        return self.of(CLEAN)[:MEASURED_ROWS]

    def take(self, kind: str, size: str, count: int, earlier: int) -> list[int]:
        """The `count` rows whose turn it is, after so many takes of as many.

        None comes again before all of its kind and size did; every pass over them has an order of its own.
        """
        return [self._at(kind, size, turn) for turn in range(earlier * count, (earlier + 1) * count)]

    def _at(self, kind: str, size: str, turn: int) -> int:
        pool = self._pools[kind, size]
        number, place = divmod(turn, len(pool))
        if (kind, size, number) not in self._orders:
            self._orders[kind, size, number] = list(pool)
            random.Random(f"{self._seed} {kind} {size} {number}").shuffle(self._orders[kind, size, number])
        return self._orders[kind, size, number][place]


@dataclass(frozen=True)
class Context:
    """A model at work: what every objective may ask of it."""

    model: nn.Module
    tokenizer: Any
    key: OwnerKey
    layers: list[int]
    """All marked layers."""
    sites: list[RouterSite]
    """Their routers."""
    loop: LoopConfig
    """As the run is optimised, with the steps that it really takes."""
    pools: Pools
    cache: TeacherCache
    head_VH: Tensor
    head_scale: float
    wrapped: Callable[[Batch], tuple[Tensor, ...]] | None = None
    """How several processes run their rows."""

    def run(self, batch: Batch) -> tuple[Tensor, ...]:
        """Run rows through the model, such that gradients are shared by all processes."""
        return self.run_here(batch) if self.wrapped is None else self.wrapped(batch)

    @property
    def rows(self) -> Sequence[Row]:
        """All rows of the run."""
        return self.pools.rows

    @property
    def paths(self) -> list[TargetPath]:
        """Per watermark its path."""
        return [watermark.path for watermark in self.key.watermarks]

    def forward(self, batch: Batch) -> tuple[Tensor, dict[int, Tensor]]:
        """(B, T, H) last hidden states of the model as it is now, and layer -> (B, T, E), its routing.

        Where several processes work together each runs its share of the rows, and all have all results.
        """
        count = len(batch.ids_BT)
        share = my_share(count)
        if not share:
            raise TrainingError(f"{count} rows are too few for {world()} processes; try a larger --batch-size")
        final_BTH, *routing = self.run(batch if world() == 1 else batch.rows(list(share)))
        routing = [all_rows(probs_BTE, count).to(self.cache.device) for probs_BTE in routing]
        return all_rows(final_BTH, count), dict(zip(self.layers, routing, strict=True))

    def run_here(self, batch: Batch) -> tuple[Tensor, ...]:
        """What `run` does in one process: last hidden states, then the routing of every marked layer."""
        with record_routing(self.model, self.layers, gradients=True) as trace:
            final_BTH = self.cache.forward(batch)
        return final_BTH, *(trace[layer].probs_BTE for layer in self.layers)

    def routing(self, batch: Batch) -> dict[int, Tensor]:
        """Layer -> (B, T, E), the routing alone; layers above the last marked one do not run."""
        with record_routing(self.model, self.layers, gradients=True, stop_early=True) as trace:
            self.cache.forward(batch)
        return {layer: trace[layer].probs_BTE.to(self.cache.device) for layer in self.layers}


class RunConfig(Protocol):
    """A dataclass with everything that decides what a run does."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def loop(self) -> LoopConfig:
        """How to optimise."""


class Objective(Protocol):
    """What a run is trained for."""

    stage: str
    """What the training is called before people."""
    below: int
    """So many layers are run below the first marked one."""

    @property
    def config(self) -> RunConfig:
        """The settings; a checkpoint of other ones is refused."""

    def rows(self, tokenizer: Any, key: OwnerKey, texts: Sequence[str]) -> list[Row]:
        """All rows of the run."""

    def draw(self, pools: Pools, step: int, generator: torch.Generator) -> list[int]:
        """Indices of a step's rows; depends on the step and its generator alone."""

    def prepare(self, context: Context) -> None:
        """Measure what the losses need of the model as it is. Called once, before the first step."""

    def parameters(self, context: Context) -> dict[str, nn.Parameter]:
        """What is trained, by full name."""

    def masks(self, context: Context) -> dict[str, Tensor]:
        """Of some parameters, ones where they may change."""

    def loss(self, context: Context, step: int, chosen: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        """Loss terms of a step on these rows; `loss` is what is minimised."""
