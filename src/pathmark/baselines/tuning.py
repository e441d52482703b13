"""How schemes train: a copy in float32, all weights, the one loop; and rows of text for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pathmark.baselines.scheme import SchemeConfig
from pathmark.errors import TrainingError
from pathmark.models.loading import use_fast_experts
from pathmark.progress import Progress, Silent
from pathmark.training import LoopConfig, only_trainable, run_loop
from pathmark.training.text import all_parameters


@dataclass(frozen=True, kw_only=True)
class TrainedConfig(SchemeConfig):
    """What the configs of schemes that train share."""

    OWN_RATE: ClassVar[float]
    """The scheme's peak learning rate at width 128, the best of those tried on the bundled model."""
    steps: int = 300
    """Optimiser steps."""
    lr: float | None = None
    """Peak learning rate. Null: the scheme's own, in inverse proportion to the model's width."""
    batch_size: int = 16
    """Texts per step."""
    length: int = 128
    """Tokens of a text that are trained on, at most."""
    seed: int = 0
    """Order of the texts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(min(self.steps, self.batch_size) >= 1, "at least one step of one text", "steps", "batch_size")
        self.require(self.lr is None or self.lr > 0, "the learning rate is positive or null", "lr")
        self.require(self.length >= 16, "texts have at least 16 tokens", "length")

    def rate(self, model: PreTrainedModel) -> float:
        """The peak learning rate on this model."""
        return self.lr or self.OWN_RATE * 128 / float(model.config.get_text_config().hidden_size)


def copy_to_train(model: PreTrainedModel) -> PreTrainedModel:
    """A float32 copy with the fastest experts there are."""
    copied = copy.deepcopy(model).float().eval()
    use_fast_experts(copied)
    return copied


def train(
    model: PreTrainedModel,
    step_loss: Callable[[int, torch.Generator], Mapping[str, Tensor]],
    config: TrainedConfig,
    lr: float,
    *,
    progress: Progress | None = None,
) -> None:
    """Minimise a loss over every weight, in place."""
    say = progress or Silent()
    say.stage("training", config.steps)
    loop = LoopConfig(steps=config.steps, lr=lr, seed=config.seed)

    def report(step: int, losses: Mapping[str, float]) -> None:
        say.advance(1, " ".join(f"{name} {value:.3f}" for name, value in losses.items()))

    parameters = all_parameters(model)
    try:
        with only_trainable(model, parameters):
            run_loop(parameters, step_loss, loop, progress=report)
    except TrainingError as error:
        reason = str(error).partition(";")[0]
        raise TrainingError(f"{reason}; make a key with a smaller learning rate (--set lr=...)") from error


def token_rows(tokenizer: Any, texts: Sequence[str], length: int) -> list[list[int]]:
    """Texts as token rows, cut to `length`; those of fewer than 16 tokens are left out."""
    rows = [list(tokenizer(text, add_special_tokens=False)["input_ids"])[:length] for text in texts]
    rows = [row for row in rows if len(row) >= 16]
    if not rows:
        raise TrainingError("expected texts of at least 16 tokens to train on, got none; give some with --texts")
    return rows


def padding(tokenizer: Any) -> int:
    """The token to fill rows up with."""
    return int(getattr(tokenizer, "pad_token_id", None) or 0)
