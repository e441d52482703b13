"""KGW (Kirchenbauer et al., A Watermark for Large Language Models, 2023): a bias to green tokens while sampling."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, WatermarkingConfig

from pathmark.baselines.green import GreenFigures, GreenLists, measure_green, watermark_config
from pathmark.baselines.sampling import prompts, written
from pathmark.baselines.scheme import SchemeConfig, SchemeVerdict, judged
from pathmark.progress import Progress
from pathmark.verdicts import Criteria


@dataclass(frozen=True, kw_only=True)
class GreenConfig(SchemeConfig):
    """What KGW and its distillation share: the green lists and how texts are judged."""

    gamma: float = 0.25
    """Share of the vocabulary that is green."""
    delta: float = 2.0
    """What is added to the logits of green tokens."""
    samples: int = 60
    """Texts that the suspect writes."""
    tokens: int = 200
    """Length of each."""
    prompt_tokens: int = 50
    """Tokens of an ordinary text that each begins with."""
    threshold: float = 4.0
    """z from which on a text counts as marked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 < self.gamma < 1, "gamma is a share between 0 and 1", "gamma")
        self.require(self.delta > 0, "delta is positive", "delta")
        least = min(self.samples, self.prompt_tokens)
        self.require(least >= 1, "at least one text and one token of a prompt", "samples", "prompt_tokens")
        self.require(self.tokens >= 16, "texts have at least 16 tokens", "tokens")

    @property
    def watermark(self) -> WatermarkingConfig:
        """The generation setting."""
        return watermark_config(self.secret, self.gamma, self.delta)


@dataclass(frozen=True, kw_only=True)
class KgwConfig(GreenConfig):
    """The authors' defaults."""

    selfhash: bool = False
    """The token itself decides with the three before it whether it is green, instead of the one before it alone."""

    @property
    def watermark(self) -> WatermarkingConfig:
        """The generation setting."""
        return watermark_config(self.secret, self.gamma, self.delta, selfhash=self.selfhash)


class Kgw:
    """No weight changes: the mark is a setting of generation, and gone where that is not used."""

    name = "kgw"
    summary = "A bias towards a secret part of the vocabulary while text is sampled; no weight changes."
    config = KgwConfig
    in_weights = False

    def embed(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        config: KgwConfig,
        texts: Sequence[str],
        *,
        progress: Progress | None = None,
    ) -> PreTrainedModel:
        """The same weights with the setting in `generation_config`, which `generate` obeys."""
        return biased(model, config.watermark)

    def verify(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        config: KgwConfig,
        probes: Sequence[str],
        *,
        criteria: Criteria | None = None,
        progress: Progress | None = None,
    ) -> SchemeVerdict:
        """Let the suspect write, and count green tokens."""
        return judge_texts(self.name, model, tokenizer, config, probes, criteria, progress)


def biased(model: PreTrainedModel, watermark: WatermarkingConfig) -> PreTrainedModel:
    """The model with this setting of generation; its weights are shared."""
    marked = copy.copy(model)
    marked.generation_config = copy.deepcopy(model.generation_config)
    marked.generation_config.watermarking_config = watermark
    return marked


def judge_texts(
    scheme: str,
    model: PreTrainedModel,
    tokenizer: Any,
    config: GreenConfig,
    probes: Sequence[str],
    criteria: Criteria | None,
    progress: Progress | None,
) -> SchemeVerdict:
    """The verdict on what a model writes after the beginnings of the probes."""
    begun = prompts(tokenizer, probes, config.samples, config.prompt_tokens)
    texts = written(model, tokenizer, begun, config.tokens, progress=progress)
    found = measure_green(GreenLists(config.watermark, config.vocabulary), texts, config.threshold)
    return judged(
        SchemeVerdict(
            scheme=scheme,
            p=found.p,
            p_floor=found.p_floor,
            criteria=criteria or Criteria(),
            wsr=found.passed,
            counted=f"texts of {config.tokens} tokens with z >= {config.threshold:g}",
            examined=f"We let the model write {config.samples} texts of {config.tokens} tokens and counted those that "
            "the secret prefers.",
            figures=_figures(found),
        )
    )


def _figures(found: GreenFigures) -> dict[str, float]:
    figures = {
        "green_share": found.pooled.green / found.pooled.total,
        "different_ngrams": found.pooled.total,
        "log10_p_of_that_share": found.p_share.log10,
        "median_z": found.median_z,
    }
    return figures if found.p_passed is None else {**figures, "median_p_of_texts_that_pass": found.p_passed.value}
