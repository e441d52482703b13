"""What a model is made of, read from its config alone: no weight is loaded."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from math import comb
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig

from pathmark.errors import ModelError
from pathmark.models.loading import check_safetensors, load_config, parameters_on_disk, resolve_model, run_our_way
from pathmark.models.routers import RouterSite, count_layers, find_routers
from pathmark.models.sizes import Sizes, sizes_of
from pathmark.models.skeleton import build_skeleton

ENOUGH_PATHS = 10**6
"""Of an owner's pairs of experts, one for each layer: as many as the default level of `pathmark verify` asks for."""


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """One decoder layer."""

    layer: int
    experts: int
    """0 in a dense layer."""
    top_k: int
    kind: str
    """Router kind, or `dense`."""

    @property
    def is_moe(self) -> bool:
        """Whether the layer routes."""
        return self.experts > 0


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """Everything `pathmark inspect` shows."""

    source: str
    model_type: str
    architecture: str
    vocabulary: int
    hidden_size: int
    parameters: int
    active: int
    """Parameters that one token meets: of each layer's experts only as many as it chooses."""
    layers: tuple[LayerFacts, ...]
    recommended: tuple[int, ...]
    """Layers to watermark: the last third of the routed ones, 4 to 6 where there are as many and experts enough."""
    weights: str
    """State of the weight files: `ok`, `absent`, or a hub id's `remote`."""
    sizes: Sizes
    """Parameters by layer and part."""

    @property
    def routed(self) -> tuple[LayerFacts, ...]:
        """The layers with a router."""
        return tuple(layer for layer in self.layers if layer.is_moe)

    def facts(self, layer: int) -> LayerFacts:
        """One layer's facts."""
        if not 0 <= layer < len(self.layers):
            raise ModelError(f"layer {layer} does not exist; this model has layers 0-{len(self.layers) - 1}")
        return self.layers[layer]


def recommended_layers(routed: list[int], experts: int) -> tuple[int, ...]:
    """The last third of the routed layers, at least 4 and at most 6 (the paper's last 4 to 6); more where layers of so
    few experts leave too few pairs of them for a p of one in a million once a layer is lost.
    """
    count = min(6, max(4, len(routed) // 3))
    while count < len(routed) and comb(experts, 2) ** (count - 1) < ENOUGH_PATHS:
        count += 1
    return tuple(routed[-count:])


def inspect_model(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> ModelReport:
    """Read a model's config, build its skeleton without memory, and list its routers."""
    source = resolve_model(name)
    config = load_config(source, trust_remote_code=trust_remote_code)
    return _report(name, config, _weights_state(source), trust_remote_code)


def presets() -> dict[str, dict[str, Any]]:
    """Configs of known models, by name: what their published config.json says about shapes."""
    found: dict[str, dict[str, Any]] = json.loads(files("pathmark.models").joinpath("presets.json").read_text())
    return found


def inspect_known(name: str) -> ModelReport | None:
    """The report of a known model from its name alone, with or without its publisher's and a variant's; None for any
    other."""
    wanted = name.rpartition("/")[2].lower()
    for known, said in presets().items():
        if wanted == known.lower() or wanted.startswith(f"{known.lower()}-"):
            return _report(known, run_our_way(AutoConfig.for_model(**said)), "absent", False)
    return None


def _report(name: str | os.PathLike[str], config: Any, weights: str, trust_remote_code: bool) -> ModelReport:
    skeleton = build_skeleton(name, config, trust_remote_code)
    sites = find_routers(skeleton)
    parameters = sum(p.numel() for p in skeleton.parameters())
    if weights == "ok" and getattr(config, "quantization_config", None) is None:
        _check_complete(Path(resolve_model(name)), parameters)
    by_layer = {site.layer: site for site in sites}
    total = max(count_layers(skeleton, sites), max(by_layer) + 1)
    text_config = config.get_text_config()
    return ModelReport(
        source=os.fspath(name),
        model_type=str(config.model_type),
        architecture=type(skeleton).__name__,
        vocabulary=int(text_config.vocab_size),
        hidden_size=int(sites[0].weight.shape[1]),
        parameters=parameters,
        active=_active(skeleton, by_layer),
        layers=tuple(_facts(layer, by_layer.get(layer)) for layer in range(total)),
        recommended=recommended_layers(sorted(by_layer), min(site.n_experts for site in sites)),
        weights=weights,
        sizes=sizes_of(skeleton, by_layer, total, int(sites[0].weight.shape[1]), int(text_config.vocab_size)),
    )


def _active(skeleton: nn.Module, by_layer: Mapping[int, RouterSite]) -> int:
    """All parameters, those of routed experts by the share that is chosen."""
    share = min((site.top_k / site.n_experts for site in by_layer.values()), default=1.0)
    return int(
        sum(
            p.numel() * (share if re.search(r"(^|\.)experts(\.|$)", name) else 1.0)
            for name, p in skeleton.named_parameters()
        )
    )


def _facts(layer: int, site: RouterSite | None) -> LayerFacts:
    if site is None:
        return LayerFacts(layer=layer, experts=0, top_k=0, kind="dense")
    return LayerFacts(layer=layer, experts=site.n_experts, top_k=site.top_k, kind=site.kind)


def _weights_state(source: str) -> str:
    folder = Path(source)
    if not folder.is_dir():
        return "remote"
    if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        check_safetensors(folder)
        return "ok"
    return "absent"


def _check_complete(folder: Path, parameters: int) -> None:
    """Renaming and fusing keep the number of elements: counting finds lost tensors without any names."""
    stored = parameters_on_disk(folder)
    if stored < parameters:
        raise ModelError(
            f"{folder} holds {stored:,} of the {parameters:,} parameters that its config asks for; "
            "expected a complete checkpoint (the rest would be random)"
        )
