"""Parameters of chosen parts of chosen layers, by name."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from pathmark.errors import ModelError
from pathmark.models.routers import find_routers, select_sites

PARTS = ("router", "attention", "experts")


def part_parameters(model: nn.Module, layers: Iterable[int], parts: Iterable[str]) -> dict[str, nn.Parameter]:
    """Full name -> parameter of the parts asked for: `router`, `attention`, `experts`, or `layer` for all."""
    wanted = set(parts)
    if unknown := wanted - {*PARTS, "layer"}:
        raise ModelError(f"unknown parts {sorted(unknown)}; expected some of {', '.join(PARTS)} or layer")
    found: dict[str, nn.Parameter] = {}
    for site in select_sites(find_routers(model), layers):
        prefix = layer_prefix(site.name)
        experts_name = f"{site.name.rpartition('.')[0]}.experts."
        for name, parameter in model.named_parameters():
            if not name.startswith(prefix) or not parameter.is_floating_point():
                continue
            inside = name.removeprefix(prefix)
            is_router = name == site.weight_name or (name.startswith(f"{site.name}.") and parameter.requires_grad)
            if (
                "layer" in wanted
                or ("router" in wanted and is_router)
                or ("attention" in wanted and _is_attention(inside))
                or ("experts" in wanted and name.startswith(experts_name))
            ):
                found[name] = parameter
    return found


def attention_below(model: nn.Module, layer: int) -> dict[str, nn.Parameter]:
    """Full name -> parameter of the attention right below a routed layer; nothing below the lowest."""
    head, number, _ = layer_prefix(select_sites(find_routers(model), [layer])[0].name).rsplit(".", 2)
    prefix = f"{head}.{int(number) - 1}."
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.startswith(prefix) and parameter.is_floating_point() and _is_attention(name.removeprefix(prefix))
    }


def layer_prefix(name: str) -> str:
    """`model.layers.7.` of `model.layers.7.mlp.gate`."""
    parts = name.split(".")
    position = next(i for i, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[: position + 1]) + "."


def _is_attention(inside: str) -> bool:
    head = inside.split(".")[0]
    return any(word in head for word in ("attn", "attention", "mixer", "mamba", "conv")) and "norm" not in head
