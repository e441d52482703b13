"""Low-rank adapters on the routers and the attention of the watermarked layers, merged when done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pathmark.errors import MissingLibraryError
from pathmark.models import find_routers, select_sites
from pathmark.models.parts import part_parameters


def add_adapters(model: nn.Module, layers: Sequence[int], *, rank: int = 8) -> Any:
    """The model wrapped by peft. Routers are bare parameters in most families, so they are targeted as such."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingLibraryError("adapters need peft; try `pip install 'pathmark[lora]'`") from error
    routers = {site.weight_name for site in select_sites(find_routers(model), layers)}
    modules = dict(model.named_modules())
    attention = [
        name.removesuffix(".weight")
        for name in part_parameters(model, layers, ["attention"])
        if name.endswith(".weight") and isinstance(modules.get(name.removesuffix(".weight")), nn.Linear)
    ]
    bare = sorted(name for name in routers if not isinstance(modules[name.removesuffix(".weight")], nn.Linear))
    linear = sorted(name.removesuffix(".weight") for name in routers - set(bare))
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules=attention + linear or None,
        target_parameters=bare or None,
    )
    return get_peft_model(model, config)


def merge_adapters(wrapped: Any) -> nn.Module:
    """The plain model with the adapters' change added to its weights."""
    merged = wrapped.merge_and_unload()
    assert isinstance(merged, nn.Module)
    return merged
