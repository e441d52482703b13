"""One optimiser loop, shared by embedding and by attacks: resumable, interruptible, the same every time.

What happens in step t depends on the seed and on t alone, never on what a generator went through before, so a
run that was killed and resumed ends with the weights of an unbroken one.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from pathmark.errors import TrainingError
from pathmark.models.ranks import averaged, others_may_end
from pathmark.training.checkpoints import restore, resumable, save
from pathmark.training.masters import Masters


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How to optimise."""

    steps: int
    """Optimiser steps."""
    lr: float
    """Peak learning rate of AdamW."""
    warmup: int = 20
    """Steps of linear warm-up; a cosine to a hundredth of the peak follows."""
    damping: float = 0.0
    """Adam's epsilon as a share of the root mean square that a gradient of norm `clip` has. Adam moves every weight
    about equally far, one that is only shaken by noise too; with damping, weights whose gradient is small beside the
    others' hardly move."""
    homing: float = 0.0
    """Decoupled decay as AdamW's, but towards where the weights began: what nothing asks for goes back."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Seed of the step generators."""
    recompute: bool = False
    """Keep nothing that layers compute for the backward pass, and compute it again there."""
    checkpoint_every: int = 25
    """Steps between checkpoints, where a checkpoint path is given."""

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.lr < math.inf or self.checkpoint_every < 1:
            raise ValueError(f"steps, lr and checkpoint_every must be positive numbers, got {self}")

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@dataclass(frozen=True)
class Constraints:
    """What a run may change, where it is drawn back to, and what it does for a wrapper."""

    masks: Mapping[str, Tensor]
    """Of some parameters: one for entries that may change, zero for others."""
    home: Mapping[str, Tensor]
    """Where `homing` leads; of a masked parameter the rows that may change. Parameters that are not named go back to
    where the run began."""
    not_averaged: Collection[str] = ()
    """Parameters of whose gradients each of several processes has its own: the loop averages them."""


@dataclass(frozen=True)
class LoopResult:
    """How a run ended."""

    steps: int
    """Steps taken, those of earlier runs included."""
    losses: Mapping[str, float]
    """Loss terms of the last step."""


def step_generator(seed: int, step: int) -> torch.Generator:
    """The only source of randomness of a step."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step * 7_919 + 17) % 2**63)


def run_loop(
    parameters: Mapping[str, torch.nn.Parameter],
    step_loss: Callable[[int, torch.Generator], Mapping[str, Tensor]],
    config: LoopConfig,
    *,
    checkpoint: Path | None = None,
    resume: bool = False,
    progress: Callable[[int, Mapping[str, float]], None] | None = None,
    fingerprint: str = "",
    constraints: Constraints | None = None,
) -> LoopResult:
    """Minimise `step_loss(step, generator)["loss"]` over named parameters.

    Ctrl-C (KeyboardInterrupt) and the end of the run leave a checkpoint; `resume` reads it. `fingerprint` names
    the run: a checkpoint of another one (other data, other settings) is refused.
    """
    constraints = constraints or Constraints({}, {})
    home = constraints.home
    masters = Masters(parameters, constraints.masks, constraints.not_averaged)
    optimizer = _optimizer(masters, config)
    begun = {}
    if config.homing:
        begun = {
            n: home[n][masters.rows(n)] if n in home else master.detach().clone()
            for n, master in masters.tensors.items()
        }
    step = 0
    if resume and checkpoint is not None and resumable(checkpoint):
        step = restore(checkpoint, masters, optimizer, fingerprint)
    losses: dict[str, float] = {}
    with _interrupts_deferred() as interrupted, others_may_end():
        while step < config.steps:
            for group in optimizer.param_groups:
                group["lr"] = config.rate(step)
            terms = step_loss(step, step_generator(config.seed, step))
            terms["loss"].backward()  # type: ignore[no-untyped-call]
            masters.take_gradients()
            masters.clip(config.clip)
            optimizer.step()
            with torch.no_grad():
                for name, start in begun.items():
                    masters.tensors[name].lerp_(start.float(), config.rate(step) * config.homing)
            masters.write_back()
            optimizer.zero_grad(set_to_none=True)
            losses = averaged({name: float(value.detach()) for name, value in terms.items()})
            if not math.isfinite(losses["loss"]):
                raise TrainingError(f"the loss became {losses['loss']} in step {step}; try a smaller --lr")
            step += 1
            if progress is not None:
                progress(step, losses)
            stop = averaged({"stop": float(bool(interrupted))})["stop"] > 0  # of anybody
            if checkpoint is not None and (step % config.checkpoint_every == 0 or step == config.steps or stop):
                save(checkpoint, masters, optimizer, step, fingerprint)
            if stop:
                raise KeyboardInterrupt
    return LoopResult(steps=step, losses=losses)


def _optimizer(masters: Masters, config: LoopConfig) -> torch.optim.Optimizer:
    typical = config.clip / math.sqrt(masters.size)
    return torch.optim.AdamW(
        masters.tensors.values(),
        lr=config.lr,
        weight_decay=0.0,
        betas=(0.9, 0.99),
        eps=max(1e-8, config.damping * typical),
        fused=True,
    )


@contextmanager
def only_trainable(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Gradients for these parameters alone; every flag is as before when the block ends.

    Nothing below the lowest of them is run backwards.
    """
    if not parameters:
        raise TrainingError("nothing to train: the chosen parts have no parameters in the chosen layers")
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    try:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in parameters)
        yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(flags.get(name, False))


@contextmanager
def _interrupts_deferred() -> Iterator[list[int]]:
    """Ctrl-C waits for the end of the step, so that a checkpoint never holds half an update.

    Yields a list that is filled by the first Ctrl-C; the second one stops at once.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen  # Python delivers signals to the main thread only
        return

    def note(number: int, frame: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
