"""What the library does not tell about routers, in one place.

transformers declares which module produces router logits; how those logits become a decision is code. This
table names the scoring function of every router class, and the few classes whose shape is their own.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor, nn

from pathmark.errors import ModelError


class Scoring(StrEnum):
    """How a router turns logits into the scores it ranks."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    TOPK_SOFTMAX = "top-k then softmax"
    SPARSEMIXER = "sparsemixer"
    SQRT_SOFTPLUS = "sqrt-softplus"


_SOFTMAX = (
    "DbrxRouter DeepseekV2TopkRouter Ernie4_5_MoeTopKRouter FlexOlmoTopKRouter Gemma4TextRouter "
    "HunYuanMoEV1Gate JambaTopKRouter LongcatFlashTopkRouter MellumTopKRouter MiniMaxTopKRouter "
    "MixtralTopKRouter OlmoeTopKRouter Qwen2MoeTopKRouter Qwen3MoeTopKRouter Qwen3NextTopKRouter "
    "Qwen3_5MoeTopKRouter Qwen4ExpTextTopKRouter ZayaRouter"
)
_SIGMOID = (
    "AXK1TopkRouter AXK2TopkRouter AfmoeTokenChoiceRouter BailingHybridTopkRouter BeamTopKRouter "
    "DeepseekV32TopkRouter DeepseekV3TopkRouter Dots1TopkRouter ExaoneMoeTopkRouter FlintTopKRouter "
    "Glm4MoeLiteTopkRouter Glm4MoeTopkRouter GlmMoeDsaTopkRouter HYV3TopKRouter HYV4TopkRouter "
    "InklingTopkRouter KimiLinearTopkRouter Kolibri1TopKRouter LagunaTopKRouter Lfm2MoeTopKRouter "
    "Llama4Router MiMoV2FlashTopkRouter MiniMaxM2TopKRouter MiniMaxM3VLTopKRouter NemotronHTopkRouter "
    "SolarOpenTopkRouter"
)
_TOPK_SOFTMAX = (
    "AriaTextTopKRouter GptOssTopKRouter GraniteMoeHybridTopKRouter GraniteMoeSWATopKRouter "
    "GraniteMoeSharedTopKRouter GraniteMoeTopKRouter JetMoeTopKGating"
)
_SCORING: dict[str, Scoring] = (
    dict.fromkeys(_SOFTMAX.split(), Scoring.SOFTMAX)
    | dict.fromkeys(_SIGMOID.split(), Scoring.SIGMOID)
    | dict.fromkeys(_TOPK_SOFTMAX.split(), Scoring.TOPK_SOFTMAX)
    | {"PhimoeTopKRouter": Scoring.SPARSEMIXER}
)

NOT_PER_EXPERT: dict[str, str] = {
    "DogeCDMoE": "product keys: its router scores half-keys, not experts, and picks among pairs",
}
"""Classes that record router logits but have no row of weights per expert; the user sees the reason."""

NOT_FEED_FORWARD = frozenset({"JetMoeAttention"})
"""Recorded beside the feed-forward routers, but they choose attention heads."""


def scoring_of(router: nn.Module) -> Scoring:
    """The scoring function of a router, or a clear refusal for a class this version does not know."""
    name = type(router).__name__
    if name == "DeepseekV4TopKRouter":
        return _configured(router.score_fn)
    if name == "Cohere2MoeTopKRouter":
        return Scoring.SIGMOID if router.expert_selection_fn == "sigmoid" else Scoring.TOPK_SOFTMAX
    if name in _SCORING:
        return _SCORING[name]
    raise ModelError(
        f"router class {name} is not known; expected one of the {len(_SCORING) + 2} classes behind "
        "docs/models.md. Try a newer PathMark, or add its scoring function to pathmark/models/families.py"
    )


def _configured(function: object) -> Scoring:
    """The scoring of a router that takes its function from the config: a module or a plain function."""
    name = f"{type(function).__name__} {getattr(function, '__name__', '')}".lower().replace("_", "")
    for part, scoring in (("sqrtsoftplus", Scoring.SQRT_SOFTPLUS), ("sigmoid", Scoring.SIGMOID)):
        if part in name:
            return scoring
    raise ModelError(f"router scoring {function!r} is not known; expected sqrt-softplus or sigmoid")


LOG_SCORE: dict[Scoring, Callable[[Tensor], Tensor]] = {
    Scoring.SOFTMAX: lambda logits: logits,
    Scoring.TOPK_SOFTMAX: lambda logits: logits,
    Scoring.SPARSEMIXER: lambda logits: logits,
    Scoring.SIGMOID: F.logsigmoid,
    Scoring.SQRT_SOFTPLUS: lambda logits: 0.5 * torch.log(F.softplus(logits)),
}
"""log of the score, up to a constant per token. Each is strictly increasing in the logit."""


def log_distribution(logits: Tensor, scoring: Scoring) -> Tensor:
    """log g over the last axis: the routing distribution of the paper, for every kind of router.

    Softmax routers: g = softmax(z) as in the paper. Routers that score experts one by one (sigmoid and the
    like): g is their scores divided by their sum. In both, g ranks the experts exactly as the logits do, so
    TopK(g, k) is the decision wherever no correction bias or group limit intervenes.
    """
    return torch.log_softmax(LOG_SCORE[scoring](logits.float()), dim=-1)
