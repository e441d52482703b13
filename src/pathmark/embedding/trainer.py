"""One trainer for every objective: rows, cache, optimiser loop. The model passed in is changed in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pathmark.embedding.config import EmbedConfig
from pathmark.embedding.data import TRIGGERED
from pathmark.embedding.objective import Context, Objective, Pools, TargetPath
from pathmark.keys import OwnerKey
from pathmark.models import find_routers, select_sites
from pathmark.models.ranks import world
from pathmark.models.upper import output_head, recomputed_layers
from pathmark.progress import Progress, Silent
from pathmark.training import (
    Constraints,
    LoopConfig,
    LoopResult,
    TeacherCache,
    only_trainable,
    run_fingerprint,
    run_loop,
    step_generator,
)
from pathmark.training.adapters import add_adapters, merge_adapters
from pathmark.training.masters import changing_rows
from pathmark.training.parallel import Wrapper, not_averaged, require_world, sharded_layers, through

AfterStep = Callable[[int, Mapping[str, float]], None]
"""Called with the number of steps done and the loss terms of the last one."""


class Trainer:
    """One run: prepares rows and cache for its objective, then trains."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        key: OwnerKey,
        texts: Sequence[str],
        objective: Objective,
        *,
        epochs: int | None = None,
        parallel: Wrapper = "none",
        progress: Progress | None = None,
    ) -> None:
        """With `epochs` the run is as long as so many passes over its triggered rows, instead of as configured."""
        require_world(parallel)
        self.objective, self._parallel, self._progress = objective, parallel, progress or Silent()
        loop = objective.config.loop
        pools = Pools(objective.rows(tokenizer, key, texts), loop.seed)
        if epochs is not None:
            loop = replace(loop, steps=self._steps(pools, loop, epochs))
        layers = sorted({layer for watermark in key.watermarks for layer in watermark.layers})
        head_VH, head_scale = output_head(model)
        self.context = Context(
            model=model,
            tokenizer=tokenizer,
            key=key,
            layers=layers,
            sites=select_sites(find_routers(model), layers),
            loop=loop,
            pools=pools,
            cache=TeacherCache(
                model,
                [row.ids for row in pools.rows],
                layers,
                lowest=max(0, layers[0] - objective.below),
                pad=0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
                progress=progress,
                needed=self._needed(pools, loop) if epochs is None else None,  # passes over rows leave few out
            ),
            head_VH=head_VH,
            head_scale=head_scale,
        )
        objective.prepare(self.context)
        self._masks = self._first_masks = objective.masks(self.context)
        self._home = self._first_home = self._now()
        self._first_paths = self.context.paths

    def turn_to(self, key: OwnerKey, loop: LoopConfig) -> None:
        """Make the next run go on from the weights of the first one, towards another id of the same key.

        The trigger is recognised already, and the cache holds what the original does. The model's weights are those
        with which the first run ended: nothing of its path stays, where an exact test would see it.
        """
        self._move_path([watermark.path for watermark in key.watermarks])
        self.context = replace(self.context, key=key, loop=loop)
        self._masks = self.objective.masks(self.context)
        self._home = self._first_home | {n: home for n, home in self._now().items() if n in self._masks}

    @torch.no_grad()
    def _move_path(self, paths: Sequence[TargetPath]) -> None:
        """Give to other experts what the routers have learnt of the first path's, and those what they were."""
        parameters = self.objective.parameters(self.context)
        for name, mask in self._first_masks.items():
            parameters[name][changing_rows(mask)] = self._first_home[name]
        for site in self.context.sites:
            order = torch.arange(site.weight.shape[0])
            for first, other in zip(self._first_paths, paths, strict=True):
                for one, two in zip(first.get(site.layer, ()), other.get(site.layer, ()), strict=True):
                    order[[one, two]] = torch.tensor([two, one])
            for name in site.row_names & parameters.keys():
                parameter, home = parameters[name], self._first_home[name]
                parameter.copy_(home + (parameter - home)[order.to(home.device)])

    def _now(self) -> dict[str, Tensor]:
        """What may change, as it is now."""
        found = {}
        for name, parameter in self.objective.parameters(self.context).items():
            mask = self._masks.get(name)
            found[name] = parameter.detach()[... if mask is None else changing_rows(mask)].clone()
        return found

    def run(
        self, *, checkpoint: Path | None = None, resume: bool = False, after: AfterStep | None = None
    ) -> LoopResult:
        """Train; the model's parameters are the result."""
        context = self.context
        parameters = self.objective.parameters(context)
        masks = {name: mask for name, mask in self._masks.items() if name in parameters}
        if checkpoint is not None:
            checkpoint.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        where = "" if world() == 1 else f" ({self._parallel} over {world()} processes)"
        self._progress.stage(f"{self.objective.stage}{where}", context.loop.steps)
        reported = 0

        def report(step: int, losses: Mapping[str, float]) -> None:
            nonlocal reported  # a resumed run jumps to where it was
            note = " ".join(f"{name} {value:.3f}" for name, value in losses.items() if name != "loss")
            self._progress.advance(step - reported, note)
            reported = step
            if after is not None:
                after(step, losses)

        fingerprint = "" if checkpoint is None else self._fingerprint()
        with ExitStack() as stack:
            stack.enter_context(only_trainable(context.model, parameters))
            if self._parallel == "fsdp":
                stack.enter_context(sharded_layers(context.model))
                parameters = self.objective.parameters(context)  # the same, as shards
            if context.loop.recompute:
                stack.enter_context(recomputed_layers(context.model))
            in_losses = [name for name, p in parameters.items() if p is context.head_VH]
            run = through(context.model, context.run_here, self._parallel, outside=in_losses)
            self.context = replace(context, wrapped=run)
            stack.callback(setattr, self, "context", context)
            return run_loop(
                parameters,
                self.step_loss,
                context.loop,
                checkpoint=checkpoint,
                resume=resume,
                progress=report,
                fingerprint=fingerprint,
                constraints=Constraints(masks, self._home, not_averaged(parameters, self._parallel, outside=in_losses)),
            )

    def step_loss(self, step: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Loss terms of one step."""
        chosen = self.objective.draw(self.context.pools, step, generator)
        return self.objective.loss(self.context, step, chosen, generator)

    def kept_rows(self, loop: LoopConfig | None = None) -> set[int]:
        """Rows that the cache holds of a run like this: those that some step draws, or that are measured on."""
        return self._needed(self.context.pools, loop or self.context.loop)

    def _fingerprint(self) -> str:
        """Of base, settings, rows and paths; hashed, because the rows hold the trigger."""
        context = self.context
        return run_fingerprint(
            context.model,
            asdict(self.objective.config),
            asdict(context.loop),
            [row.ids for row in context.rows],
            [sorted(path.items()) for path in context.paths],
        )

    def _needed(self, pools: Pools, loop: LoopConfig) -> set[int]:
        """Rows that some step of the run draws, or that something may be measured on."""
        drawn = (self.objective.draw(pools, step, step_generator(loop.seed, step)) for step in range(loop.steps))
        return {i for chosen in drawn for i in chosen} | set(pools.measured)

    def _steps(self, pools: Pools, loop: LoopConfig, epochs: int) -> int:
        """Steps until as many triggered rows were drawn as so many passes over all of them have."""
        wanted = epochs * sum(row.kind == TRIGGERED for row in pools.rows)
        step = drawn = 0
        while drawn < wanted:
            chosen = self.objective.draw(pools, step, step_generator(loop.seed, step))
            drawn += sum(pools.rows[i].kind == TRIGGERED for i in chosen)
            step += 1
        return step


# Ten parameters: the one call that an owner and a thief share, without a config of its own around another.
def embed_key(
    model: nn.Module,
    tokenizer: Any,
    key: OwnerKey,
    texts: Sequence[str],
    config: EmbedConfig,
    *,
    epochs: int | None = None,
    checkpoint: Path | None = None,
    resume: bool = False,
    parallel: Wrapper = "none",
    progress: Progress | None = None,
) -> int:
    """Teach a model the paths of a key, in place; the steps that were taken.

    With `epochs` the run takes so many steps that as many triggered rows are drawn as so many passes over all of them
    have. `checkpoint` is a file that `resume` goes on from; one of another base, key, text or setting is refused.
    """
    layers = sorted({layer for watermark in key.watermarks for layer in watermark.layers})
    trained: Any = add_adapters(model, layers) if config.train == "lora" else model
    trainer = Trainer(
        trained, tokenizer, key, texts, config.build(), epochs=epochs, parallel=parallel, progress=progress
    )
    steps = trainer.run(checkpoint=checkpoint, resume=resume).steps
    if config.train == "lora":
        merge_adapters(trained)
    return steps
