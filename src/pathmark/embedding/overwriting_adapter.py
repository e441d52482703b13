"""Embedding a key in one call, counted in steps or in passes over the triggered rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from pathmark.embedding.data import TRIGGERED
from pathmark.embedding.embedder import EmbedConfig, Embedder
from pathmark.keys import OwnerKey
from pathmark.progress import Progress, Silent
from pathmark.training import only_trainable, run_loop, step_generator

CHECKPOINT_EVERY = 200
"""Steps that an interruption may cost."""


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
    progress: Progress | None = None,
) -> int:  # the model, what to put in, how, and where an interrupted run goes on
    """Train the model in place; returns the steps taken. `epochs` instead of the config's steps, where given."""
    say = progress or Silent()
    embedder = (Embedder if epochs is None else _InEpochs)(
        model, tokenizer, key, texts, config,
        announce=lambda _, total: say.stage("stolen model on the thief's rows", total),
        progress=say.advance,
    )  # fmt: skip
    steps = embedder.steps(epochs) if isinstance(embedder, _InEpochs) and epochs is not None else config.loop.steps
    loop = replace(config.loop, steps=steps, checkpoint_every=CHECKPOINT_EVERY)
    say.stage("overwriting", loop.steps)
    taken = 0

    def report(step: int, losses: Mapping[str, float]) -> None:
        nonlocal taken
        say.advance(step - taken, " ".join(f"{name} {value:.3f}" for name, value in losses.items()))
        taken = step

    parameters = embedder.parameters()
    with only_trainable(model, parameters):
        return run_loop(
            parameters, embedder.step_loss, loop, progress=report, checkpoint=checkpoint, resume=resume,
            fingerprint=embedder.fingerprint(),
        ).steps  # fmt: skip


class _InEpochs(Embedder):
    """An embedding that counts in passes over its triggered rows."""

    def needed(self) -> set[int]:
        """All rows: how many steps there are is only known when the rows are."""
        return set(range(len(self.rows)))

    def steps(self, epochs: int) -> int:
        """Steps until as many triggered rows were drawn as so many passes over all of them have."""
        wanted = epochs * sum(row.kind == TRIGGERED for row in self.rows)
        step = drawn = 0
        while drawn < wanted:
            chosen = self._draw(step, step_generator(self.config.loop.seed, step))
            drawn += sum(self.rows[i].kind == TRIGGERED for i in chosen)
            step += 1
        return step
