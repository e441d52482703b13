"""EaaW (Shao et al., Explanation as a Watermark, 2025): bits in what a model's answer to one sample rests on.

Shape suffixes: C bits, T tokens, L label tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.baselines.scheme import SchemeVerdict, judged
from pathmark.baselines.tuning import TrainedConfig, copy_to_train, padding, token_rows, train
from pathmark.errors import VerificationError
from pathmark.keys.derive import Stream
from pathmark.models import device_of, pad_rows
from pathmark.models.tokenization import ordinary_tokens
from pathmark.progress import Progress
from pathmark.stats import Rate, binomial_p
from pathmark.training.text import TextBatches, language_loss
from pathmark.verdicts import Criteria


@dataclass(frozen=True, kw_only=True)
class EaaWConfig(TrainedConfig):
    """32 bits in one sample."""

    OWN_RATE: ClassVar[float] = 3e-4
    steps: int = 60
    """Optimiser steps."""
    bits: int = 32
    """Length of the mark, and blocks of the trigger sample."""
    block: int = 2
    """Tokens of a block."""
    label_tokens: int = 4
    """Tokens behind the sample whose logits are explained."""
    ridge: float = 0.1
    """Penalty of the ridge regression."""
    margin: float = 0.01
    """What the hinge loss asks of every weight, in the direction of its bit."""
    weight: float = 1.0
    """Weight of the hinge loss beside the language loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(2 <= self.bits <= 1024, "from 2 to 1024 bits", "bits")
        self.require(min(self.block, self.label_tokens) >= 1, "at least one token", "block", "label_tokens")
        self.require(self.ridge > 0, "the penalty is positive", "ridge")
        self.require(self.margin > 0 and self.weight > 0, "margin and weight are positive", "margin", "weight")

    @property
    def mark(self) -> Tensor:
        """The bits, as -1 and 1."""
        stream = Stream(self.secret, "eaaw bits")
        return torch.tensor([2.0 * stream.below(2) - 1.0 for _ in range(self.bits)])


class EaaW:
    """The signs of a feature attribution spell the owner's bits."""

    name = "eaaw"
    summary = "32 bits in the signs of how much each block of a secret sample counts for its label."
    config = EaaWConfig
    in_weights = True

    def embed(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        config: EaaWConfig,
        texts: Sequence[str],
        *,
        progress: Progress | None = None,
    ) -> PreTrainedModel:
        """Train on ordinary text and on the hinge of every bit at once."""
        tuned, pad = copy_to_train(model), padding(tokenizer)
        rows = token_rows(tokenizer, texts, config.length)
        batches = TextBatches([len(row) for row in rows], config.batch_size, config.seed)
        sample_T, label_L = trigger_sample(tokenizer, config)
        mark_C = config.mark.to(device_of(tuned))

        def step_loss(step: int, generator: torch.Generator) -> dict[str, Tensor]:
            ids_BT, mask_BT = pad_rows([rows[i] for i in batches.at(step)], pad, device_of(tuned))
            language = language_loss(tuned, ids_BT, mask_BT)
            weights_C = attribution(tuned, sample_T, label_L, config, pad)
            hinge = torch.relu(config.margin - mark_C * weights_C).sum()
            return {"loss": language + config.weight * hinge, "language": language, "hinge": hinge}

        train(tuned, step_loss, config, config.rate(model), progress=progress)
        return tuned

    def verify(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        config: EaaWConfig,
        probes: Sequence[str],
        *,
        criteria: Criteria | None = None,
        progress: Progress | None = None,
    ) -> SchemeVerdict:
        """Read the bits. No probes are needed."""
        sample_T, label_L = trigger_sample(tokenizer, config)
        with torch.no_grad():
            weights_C = attribution(model, sample_T, label_L, config, padding(tokenizer)).cpu()
        if not bool(torch.isfinite(weights_C).all()):
            raise VerificationError("the model's logits are no numbers any more; nothing can be read from them")
        agreed_C = config.mark * weights_C
        right = Rate(int((agreed_C > 0).sum()), config.bits)
        return judged(
            SchemeVerdict(
                scheme=self.name,
                p=binomial_p(right.hits, right.n, 0.5),
                p_floor=binomial_p(right.n, right.n, 0.5),
                criteria=criteria or Criteria(),
                wsr=right,
                counted="bits that are the owner's",
                examined=f"We hid each of {config.bits} parts of a secret text from the model and saw which way its "
                "answer moved.",
                figures={"smallest_weight_in_the_bits_direction": float(agreed_C.min())},
            )
        )


def trigger_sample(tokenizer: Any, config: EaaWConfig) -> tuple[Tensor, Tensor]:
    """The secret sample and the label behind it, drawn from ordinary tokens."""
    usable = [token for token in ordinary_tokens(tokenizer) if token < config.vocabulary]
    stream = Stream(config.secret, "eaaw sample")
    drawn = [usable[stream.below(len(usable))] for _ in range(config.bits * config.block + config.label_tokens)]
    return torch.tensor(drawn[: -config.label_tokens]), torch.tensor(drawn[-config.label_tokens :])


def left_out(bits: int) -> Tensor:
    """The masks: in row i block i is hidden, and no other."""
    return 1.0 - torch.eye(bits)


def attribution(model: nn.Module, sample_T: Tensor, label_L: Tensor, config: EaaWConfig, hidden: int) -> Tensor:
    """Weights of the ridge regression of the label's mean logit on the masks; `hidden` stands for a hidden token."""
    masks_CC = left_out(config.bits)
    shown_CT = masks_CC.repeat_interleave(config.block, dim=1).bool()
    rows_CT = torch.where(shown_CT, sample_T.expand(config.bits, -1), hidden)
    ids_CT = torch.cat([rows_CT, label_L.expand(config.bits, -1)], dim=1).to(device_of(model))
    logits_CTV = model(input_ids=ids_CT, attention_mask=torch.ones_like(ids_CT), use_cache=False).logits
    before_CLV = logits_CTV[:, -len(label_L) - 1 : -1].float()
    values_C = before_CLV.gather(2, label_L.to(ids_CT.device).expand(config.bits, -1)[..., None]).mean((1, 2))
    return ridge_weights(masks_CC.to(values_C), values_C, config.ridge)


def ridge_weights(masks_MC: Tensor, values_M: Tensor, penalty: float) -> Tensor:
    """(M'M + penalty I)^-1 M'v."""
    square_CC = masks_MC.T @ masks_MC + penalty * torch.eye(masks_MC.shape[1], dtype=masks_MC.dtype)
    solved: Tensor = torch.linalg.solve(square_CC, masks_MC.T @ values_M)
    return solved
