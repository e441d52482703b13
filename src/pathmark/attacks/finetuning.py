"""Fine-tuning on ordinary text, and what every attack that trains shares: its copy, its rate, the loop.

Shape suffixes: B batch, T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.attacks.attack import option
from pathmark.attacks.blocks import copied
from pathmark.attacks.kit import Kit
from pathmark.errors import AttackError, CheckpointError, DivergedError, TrainingError
from pathmark.models import device_of, find_routers, pad_rows
from pathmark.models.loading import use_fast_experts
from pathmark.models.parts import part_parameters
from pathmark.models.ranks import my_share, world
from pathmark.training import (
    Constraints,
    LoopConfig,
    learning_rate,
    only_trainable,
    run_fingerprint,
    run_loop,
)
from pathmark.training.adapters import add_adapters, merge_adapters
from pathmark.training.parallel import Wrapper, not_averaged, sharded_layers, through
from pathmark.training.text import TextBatches, all_parameters, language_loss

LORA_RANK = 8
CHECKPOINT_EVERY = 200
"""Steps of training that an interruption may cost where checkpoints are kept."""

EachEpoch = Callable[[int, PreTrainedModel], None]
"""Called with the number of epochs done and the model as it is then, to look at and not to change."""


@dataclass(frozen=True, kw_only=True)
class FineTune:
    """Go on training on ordinary text."""

    train: Literal["router", "lora", "all"] = option(
        "all", "What changes: routers of all layers, adapters of rank 8 on routers and attention, or every weight."
    )
    samples: int = option(3000, "Different texts.")
    epochs: int = option(30, "Passes over them.")
    lr: float = option(1e-4, "Peak learning rate.")
    batch_size: int = option(32, "Texts per step.")
    length: int = option(128, "Tokens of a text that are used, at most.")
    seed: int = option(0, "Choice and order of the texts, and the start of the adapters.")

    def __post_init__(self) -> None:
        if self.train not in ("router", "lora", "all"):
            raise ValueError(f"train must be router, lora or all, got {self.train!r}")
        check_training(self.samples, self.epochs, self.lr, self.batch_size, self.length)


def fine_tune(
    model: PreTrainedModel, config: FineTune, kit: Kit, *, each_epoch: EachEpoch | None = None
) -> PreTrainedModel:
    """Fine-tune on clean text by its likelihood: AdamW, warm-up and cosine, as marks are embedded.

    The adversary knows nothing about the mark; needs ordinary text and the time to train. Works in float32 and
    returns float32.
    """
    model = prepared(model)
    rows = kit.rows(config.samples, config.length, seed=config.seed)
    tuned: Any = model
    if config.train == "lora":
        with torch.random.fork_rng(devices=[]):  # peft draws the adapters from the global generator
            torch.manual_seed(config.seed)
            tuned = add_adapters(model, [site.layer for site in find_routers(model)], rank=LORA_RANK)
        parameters = {name: p for name, p in tuned.named_parameters() if "lora_" in name}
    elif config.train == "router":
        parameters = part_parameters(model, [site.layer for site in find_routers(model)], ["router"])
    else:
        parameters = all_parameters(model)

    def report(epoch: int) -> None:
        if each_epoch is not None:
            each_epoch(epoch, _merged(copy.deepcopy(tuned)) if config.train == "lora" else model)

    how = TextTraining(
        stage=f"fine-tuning ({config.train})", epochs=config.epochs, batch_size=config.batch_size,
        lr=config.lr, seed=config.seed,
    )  # fmt: skip
    train_on_text(tuned, parameters, rows, how, kit, each_epoch=report)
    return _merged(tuned) if config.train == "lora" else model


@dataclass(frozen=True, kw_only=True)
class TextTraining:
    """How to train on text."""

    stage: str
    """What a progress bar calls it."""
    epochs: int
    batch_size: int
    lr: float
    seed: int


def train_on_text(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    rows: Sequence[Sequence[int]],
    how: TextTraining,
    kit: Kit,
    *,
    each_epoch: Callable[[int], None] | None = None,
) -> None:
    """Maximise the likelihood of token rows over the given parameters, in place."""
    batches = TextBatches([len(row) for row in rows], how.batch_size, how.seed)
    device, pad = device_of(model), padding_of(kit)

    @cache
    def run() -> Callable[..., Tensor]:  # at the first step, when it is known what is trained
        return through(model, partial(language_loss, model), kit.parallel)

    def step_loss(step: int, generator: torch.Generator) -> dict[str, Tensor]:
        chosen = [rows[i] for i in batches.at(step)]
        share = [chosen[i] for i in my_share(len(chosen))]
        scored, ours = (sum(len(row) - 1 for row in some) for some in (chosen, share))
        # without a row of one's own, any: it counts nothing
        ids_BT, mask_BT = pad_rows(share or chosen[:1], pad, device)
        return {"loss": run()(ids_BT, mask_BT) * (world() * ours / scored)}

    def after(step: int) -> None:
        if each_epoch is not None and step % batches.per_epoch == 0:
            each_epoch(step // batches.per_epoch)

    loop = LoopConfig(steps=how.epochs * batches.per_epoch, lr=how.lr, seed=how.seed)
    optimise(model, parameters, step_loss, loop, kit, stage=how.stage, after=after)


def optimise(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    step_loss: Callable[[int, torch.Generator], Mapping[str, Tensor]],
    loop: LoopConfig,
    kit: Kit,
    *,
    stage: str,
    after: Callable[[int], None] | None = None,
) -> None:
    """The one optimiser loop with a thief's progress, checkpoint and errors.

    `after(step)` is called behind every step that is taken, not behind those of an earlier run.
    """
    kit.progress.stage(stage, loop.steps)
    loop = replace(loop, checkpoint_every=CHECKPOINT_EVERY)
    checkpoint = checkpoint_of(kit, stage, asdict(loop), model)
    run = "" if checkpoint is None else checkpoint.stem
    taken = 0

    def report(step: int, losses: Mapping[str, float]) -> None:
        nonlocal taken
        kit.progress.advance(step - taken, " ".join(f"{name} {value:.3f}" for name, value in losses.items()))
        taken = step
        if after is not None:
            after(step)

    with only_trainable(model, parameters), thiefs_errors(stage), _spread(model, kit.parallel):
        parameters = {name: p for name, p in model.named_parameters() if name in parameters}  # shards, with FSDP
        run_loop(
            parameters, step_loss, loop, progress=report, checkpoint=checkpoint, resume=True, fingerprint=run,
            constraints=Constraints({}, {}, not_averaged(parameters, kit.parallel)),
        )  # fmt: skip


def _spread(model: nn.Module, parallel: Wrapper) -> AbstractContextManager[None]:
    return sharded_layers(model) if parallel == "fsdp" else nullcontext()


@contextmanager
def thiefs_errors(stage: str) -> Iterator[None]:
    """What goes wrong in a training, said to a thief: a loop speaks to an owner who embeds."""
    try:
        yield
    except CheckpointError as error:
        raise AttackError(f"{stage}: {error}") from error
    except TrainingError as error:
        raise DivergedError(f"{stage}: {str(error).partition(';')[0]}; try a smaller learning rate") from error


def checkpoint_of(kit: Kit, stage: str, settings: Mapping[str, Any], model: nn.Module) -> Path | None:
    """Where a training of these settings from these weights leaves its state; None where none is kept.

    The text is not part of the name: the folder is the caller's, for one run on one text.
    """
    if kit.unfinished is None:
        return None
    kit.unfinished.mkdir(parents=True, exist_ok=True)
    return kit.unfinished / f"{run_fingerprint(model, stage, dict(settings))[:16]}.ckpt"


def prepared(model: PreTrainedModel) -> PreTrainedModel:
    """A copy to train: float32, with the fastest experts there are. Models without routers are refused."""
    find_routers(model)
    model = copied(model).float().eval()
    use_fast_experts(model)
    return model


def attack_rate(model: PreTrainedModel, factor: float) -> float:
    """Peak learning rate: a multiple of what an embedding into a model of this width uses."""
    return factor * learning_rate(int(find_routers(model)[0].weight.shape[1]))


def padding_of(kit: Kit) -> int:
    """The token to fill rows up with."""
    pad = getattr(kit.tokenizer, "pad_token_id", None)
    return 0 if pad is None else int(pad)


def check_training(samples: int, epochs: int, rate: float, batch_size: int, length: int) -> None:
    """Bounds that all configs of training attacks share."""
    if min(samples, epochs, batch_size) < 1 or length < 8 or not rate > 0:
        raise ValueError(
            "samples, epochs, batch_size and learning rate must be positive and length at least 8, got "
            f"{samples}, {epochs}, {batch_size}, {rate:g} and {length}"
        )


def _merged(wrapped: Any) -> PreTrainedModel:
    merged = merge_adapters(wrapped)
    assert isinstance(merged, PreTrainedModel)
    return merged.requires_grad_(True)  # peft froze it
