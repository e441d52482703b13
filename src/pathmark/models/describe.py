"""The facts of a model that a key records, and the tokenizer as the key sees it."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from typing import Any

from transformers import PreTrainedModel

from pathmark.keys.facts import ModelFacts, RoutedLayer
from pathmark.models.inspection import ModelReport, inspect_model
from pathmark.models.loading import load_config, load_tokenizer
from pathmark.models.routers import count_layers, find_routers
from pathmark.models.tokenization import HFTextCodec

_VOLATILE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "quantization_config",
    }
)
"""Config entries that say how a copy is stored or run, not what the model is."""


def describe_model(
    name: str | os.PathLike[str], *, trust_remote_code: bool = False
) -> tuple[ModelFacts, HFTextCodec, ModelReport]:
    """Facts, text codec and report of a model; no weights are loaded."""
    report = inspect_model(name, trust_remote_code=trust_remote_code)
    codec = HFTextCodec(load_tokenizer(name, trust_remote_code=trust_remote_code))
    config = load_config(name, trust_remote_code=trust_remote_code)
    return facts_from_report(report, codec.digest, config_digest(config)), codec, report


def facts_from_report(report: ModelReport, tokenizer_digest: str, config: str) -> ModelFacts:
    """What a key records of a model."""
    return ModelFacts(
        architecture=report.architecture,
        model_type=report.model_type,
        num_layers=len(report.layers),
        routed=tuple(RoutedLayer(facts.layer, facts.experts, facts.top_k) for facts in report.routed),
        vocab_size=report.vocabulary,
        tokenizer_digest=tokenizer_digest,
        config_digest=config,
    )


def loaded_facts(model: PreTrainedModel, codec: HFTextCodec) -> ModelFacts:
    """The same of a model in memory."""
    sites = find_routers(model)
    return ModelFacts(
        architecture=type(model).__name__,
        model_type=str(model.config.model_type),
        num_layers=count_layers(model, sites),
        routed=tuple(RoutedLayer(site.layer, site.n_experts, site.top_k) for site in sites),
        vocab_size=int(model.config.get_text_config().vocab_size),
        tokenizer_digest=codec.digest,
        config_digest=config_digest(model.config),
    )


def config_digest(config: Any) -> str:
    """sha256 over what a config says beyond its class's defaults. A note for the owner, not a check:
    defaults move between versions of transformers."""
    entries = {name: value for name, value in config.to_diff_dict().items() if name not in _VOLATILE}
    return sha256(json.dumps(entries, sort_keys=True, default=str).encode()).hexdigest()
