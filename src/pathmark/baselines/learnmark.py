"""LearnMark (Gu et al., On the Learnability of Watermarks for Language Models, 2024): KGW distilled into the weights.

Shape suffixes: B batch, T tokens, N real tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

from pathmark.baselines.green import GreenLists
from pathmark.baselines.kgw import GreenConfig, biased, judge_texts
from pathmark.baselines.sampling import prompts, written
from pathmark.baselines.scheme import SchemeVerdict
from pathmark.baselines.tuning import TrainedConfig, copy_to_train, padding, token_rows, train
from pathmark.models import device_of, pad_rows
from pathmark.progress import Progress
from pathmark.training.text import TextBatches, language_loss
from pathmark.verdicts import Criteria


@dataclass(frozen=True, kw_only=True)
class LearnMarkConfig(GreenConfig, TrainedConfig):
    """The authors' teacher: KGW with k = 1."""

    OWN_RATE: ClassVar[float] = 3e-3
    steps: int = 150
    """Optimiser steps."""
    samples: int = 70
    """Texts that the suspect writes."""
    sampling: bool = False
    """Train on texts that the marked teacher wrote, instead of on its distribution over ordinary text."""
    taught: int = 640
    """With `sampling`: how many texts it writes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.taught >= 1, "the teacher writes at least one text", "taught")


class LearnMark:
    """The model itself prefers green tokens, however it is sampled."""

    name = "learnmark"
    summary = "KGW's bias towards green tokens, distilled into the weights."
    config = LearnMarkConfig
    in_weights = True

    def embed(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        config: LearnMarkConfig,
        texts: Sequence[str],
        *,
        progress: Progress | None = None,
    ) -> PreTrainedModel:
        """A student of the model with KGW on top."""
        student = copy_to_train(model)
        if config.sampling:  # the beginnings are not trained on
            begun = prompts(tokenizer, texts, config.taught, config.prompt_tokens)
            rows = written(biased(model, config.watermark), tokenizer, begun, config.length, progress=progress)
        else:
            rows = token_rows(tokenizer, texts, config.length)
        batches = TextBatches([len(row) for row in rows], config.batch_size, config.seed)
        lists, pad = GreenLists(config.watermark, config.vocabulary), padding(tokenizer)

        def step_loss(step: int, generator: torch.Generator) -> dict[str, Tensor]:
            ids_BT, mask_BT = pad_rows([rows[i] for i in batches.at(step)], pad, device_of(student))
            if config.sampling:
                return {"loss": language_loss(student, ids_BT, mask_BT)}
            return {"loss": distillation_loss(student, model, lists, config.delta, ids_BT, mask_BT)}

        train(student, step_loss, config, config.rate(model), progress=progress)
        return student

    def verify(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        config: LearnMarkConfig,
        probes: Sequence[str],
        *,
        criteria: Criteria | None = None,
        progress: Progress | None = None,
    ) -> SchemeVerdict:
        """KGW's statistic on plain samples."""
        return judge_texts(self.name, model, tokenizer, config, probes, criteria, progress)


def distillation_loss(
    student: nn.Module, teacher: nn.Module, lists: GreenLists, delta: float, ids_BT: Tensor, mask_BT: Tensor
) -> Tensor:
    """Mean over real tokens of KL(teacher with delta on green tokens || student)."""
    keep_BT = mask_BT.bool()
    with torch.no_grad():
        teacher_NV = teacher(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits[keep_BT].float()
        green_NV = lists.after_each(ids_BT[keep_BT].cpu()).to(teacher_NV)
        target_NV = log_softmax(teacher_NV + delta * green_NV, dim=-1)
    student_NV = student(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits[keep_BT].float()
    return kl_div(log_softmax(student_NV, dim=-1), target_NV, reduction="batchmean", log_target=True)
