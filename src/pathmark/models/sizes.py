"""How many parameters a model has, and where: what plans are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from pathmark.models.parts import layer_prefix, part_parameters
from pathmark.models.routers import RouterSite


@dataclass(frozen=True)
class LayerSize:
    """Parameters of one decoder layer."""

    attention: int
    router: int
    experts: int
    """Of all routed experts."""
    n_experts: int
    top_k: int
    rest: int
    """Norms, shared experts, dense feed-forward blocks."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.attention + self.router + self.experts + self.rest

    @property
    def expert(self) -> int:
        """Of one routed expert."""
        return self.experts // self.n_experts if self.n_experts else 0

    @property
    def active(self) -> int:
        """Those that a token meets."""
        return self.total - self.experts + self.top_k * self.expert


@dataclass(frozen=True)
class Sizes:
    """Parameters of a model."""

    hidden: int
    vocabulary: int
    layers: tuple[LayerSize, ...]
    ends: int
    """Embedding, head, last norm."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.ends + sum(layer.total for layer in self.layers)

    @property
    def active(self) -> int:
        """Those that a token meets; the embedding is looked up, the head is met."""
        return min(self.ends, self.hidden * self.vocabulary) + sum(layer.active for layer in self.layers)


def sizes_of(skeleton: nn.Module, by_layer: Mapping[int, RouterSite], layers: int, hidden: int, words: int) -> Sizes:
    """Counted on the meta device."""
    prefix = layer_prefix(next(iter(by_layer.values())).name).rsplit(".", 2)[0]
    totals = dict.fromkeys(range(layers), 0)
    outside = 0
    for name, parameter in skeleton.named_parameters():
        inside = name.removeprefix(f"{prefix}.").split(".")[0] if name.startswith(f"{prefix}.") else ""
        if inside.isdigit() and int(inside) in totals:
            totals[int(inside)] += parameter.numel()
        else:
            outside += parameter.numel()
    found = []
    for number, total in totals.items():
        site = by_layer.get(number)
        parts = {"attention": 0, "router": 0, "experts": 0}
        if site is not None:
            parts = {
                part: sum(p.numel() for p in part_parameters(skeleton, [number], [part]).values()) for part in parts
            }
        n_experts, top_k = (site.n_experts, site.top_k) if site is not None else (0, 0)
        found.append(LayerSize(**parts, n_experts=n_experts, top_k=top_k, rest=total - sum(parts.values())))
    return Sizes(hidden, words, tuple(found), outside)
