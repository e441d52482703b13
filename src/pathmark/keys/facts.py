"""What a key knows about its model, and which experts of a layer may become targets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from pathmark.errors import CapacityError
from pathmark.keys.canonical import Document

MAX_EXPERTS = 65_536
MAX_LAYERS = 4_096
"""Bounds on what a record may claim, so that a hostile one cannot start endless arithmetic."""


@dataclass(frozen=True)
class RoutedLayer:
    """One decoder layer that has a router."""

    layer: int
    """Index among all decoder layers, counted from 0."""
    experts: int
    """Routed experts; shared ones are not counted."""
    top_k: int
    """Experts that the model itself selects per token."""

    def __post_init__(self) -> None:
        if not (0 <= self.layer < MAX_LAYERS and 1 <= self.experts <= MAX_EXPERTS):
            raise CapacityError(f"layer {self.layer} with {self.experts} experts is out of range")
        if not 1 <= self.top_k <= self.experts:
            raise CapacityError(f"layer {self.layer}: top-{self.top_k} of {self.experts} experts is impossible")


@dataclass(frozen=True)
class ModelFacts:
    """The model a key was made for: enough to refuse another one, nothing that is secret."""

    architecture: str
    """Class name, such as Qwen2MoeForCausalLM."""
    model_type: str
    """Hugging Face model type, such as qwen2_moe."""
    num_layers: int
    """Decoder layers, dense ones included."""
    routed: tuple[RoutedLayer, ...]
    """The layers with a router, by rising index."""
    vocab_size: int
    tokenizer_digest: str
    """sha256 over the tokenizer's vocabulary and merges (HFTextCodec.digest)."""
    config_digest: str
    """sha256 of the canonical config."""

    def __post_init__(self) -> None:
        indices = [r.layer for r in self.routed]
        if indices != sorted(set(indices)) or (indices and indices[-1] >= self.num_layers):
            raise CapacityError("routed layers must rise and lie inside the model")

    def layer(self, index: int) -> RoutedLayer:
        """The routed layer with this index."""
        for routed in self.routed:
            if routed.layer == index:
                return routed
        known = ", ".join(str(r.layer) for r in self.routed) or "none"
        raise CapacityError(f"layer {index} has no router; layers with routers: {known}")

    def mismatches(self, other: ModelFacts) -> list[str]:
        """Why a key made for this model does not fit another one, in words; empty if it does.

        The config's digest is not compared: it moves with versions of the library.
        """
        said = []
        mine, theirs = (f"{m.architecture} ({m.model_type})" for m in (self, other))
        if mine != theirs:
            said.append(f"expected {mine}, got {theirs}")
        if other.num_layers != self.num_layers:
            said.append(f"expected {self.num_layers} layers, got {other.num_layers}")
        elif other.routed != self.routed:
            wrong = next(a for a, b in zip_longest(self.routed, other.routed) if a != b) or other.routed[-1]
            said.append(f"experts or top-k differ, first in layer {wrong.layer}")
        if other.tokenizer_digest != self.tokenizer_digest or other.vocab_size != self.vocab_size:
            said.append("the tokenizer or the vocabulary differs")
        return said

    def record(self) -> Document:
        """JSON form."""
        return {
            "architecture": self.architecture,
            "model_type": self.model_type,
            "num_layers": self.num_layers,
            "routed": [[r.layer, r.experts, r.top_k] for r in self.routed],
            "vocab_size": self.vocab_size,
            "tokenizer_digest": self.tokenizer_digest,
            "config_digest": self.config_digest,
        }

    @classmethod
    def from_record(cls, record: Document) -> ModelFacts:
        """Inverse of record()."""
        routed = tuple(RoutedLayer(*(int(v) for v in row)) for row in record["routed"])
        return cls(
            architecture=str(record["architecture"]),
            model_type=str(record["model_type"]),
            num_layers=int(record["num_layers"]),
            routed=routed,
            vocab_size=int(record["vocab_size"]),
            tokenizer_digest=str(record["tokenizer_digest"]),
            config_digest=str(record["config_digest"]),
        )


@dataclass(frozen=True)
class LayerPlan:
    """A layer's part of the key: the same for all watermarks that share the layer."""

    layer: int
    experts: int
    """Routed experts of the layer."""
    width: int
    """k: experts in a target set."""
    pool: tuple[int, ...]
    """Experts that may be targets, sorted."""
    rule: str
    """How the pool was chosen, in words: `all`, `list`, or `usage:LOW-HIGH` and the digest of the texts."""

    def __post_init__(self) -> None:
        if list(self.pool) != sorted(set(self.pool)) or not self.pool:
            raise CapacityError(f"layer {self.layer}: a pool is a non-empty rising list of experts")
        if self.pool[0] < 0 or self.pool[-1] >= self.experts or self.experts > MAX_EXPERTS:
            raise CapacityError(f"layer {self.layer}: pool reaches outside its {self.experts} experts")
        if not 1 <= self.width <= len(self.pool):
            raise CapacityError(
                f"layer {self.layer}: width {self.width} does not fit a pool of {len(self.pool)} experts; "
                "use a smaller width or a wider pool"
            )

    def record(self) -> Document:
        """JSON form."""
        return {
            "layer": self.layer,
            "experts": self.experts,
            "width": self.width,
            "pool": list(self.pool),
            "rule": self.rule,
        }

    @classmethod
    def from_record(cls, record: Document) -> LayerPlan:
        """Inverse of record()."""
        return cls(
            layer=int(record["layer"]),
            experts=int(record["experts"]),
            width=int(record["width"]),
            pool=tuple(int(e) for e in record["pool"]),
            rule=str(record["rule"]),
        )


@dataclass(frozen=True)
class PoolRule:
    """Which experts may be targets: all of them, or those of moderate use on clean text.

    `usage:LOW-HIGH` admits expert e if LOW * mean <= use(e) <= HIGH * mean, where use is the share of
    tokens of clean text that select e on the *original* model. Rare experts are the first to be pruned;
    popular ones carry much of the language.
    """

    low: float | None = None
    high: float | None = None

    @classmethod
    def parse(cls, text: str) -> PoolRule:
        """Read `all`, `usage` (bounds 0.8 and 4) or `usage:LOW-HIGH`."""
        if text == "all":
            return cls()
        if text == "usage":
            return cls(0.8, 4.0)
        match = re.fullmatch(r"usage:(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)", text)
        if not match or float(match[1]) >= float(match[2]):
            raise CapacityError(
                f"unknown pool rule {text!r}; expected all, usage or usage:LOW-HIGH such as usage:0.8-4"
            )
        return cls(float(match[1]), float(match[2]))

    @property
    def needs_usage(self) -> bool:
        """Whether the rule looks at clean routing."""
        return self.low is not None

    @property
    def name(self) -> str:
        """The text that parses to this rule; recorded in the key."""
        return "all" if self.low is None else f"usage:{self.low:g}-{self.high:g}"

    def pool(self, experts: int, usage: Sequence[float] | None = None) -> tuple[int, ...]:
        """The admitted experts, given each expert's share of selections on clean text."""
        if self.low is None or self.high is None:
            return tuple(range(experts))
        if usage is None or len(usage) != experts:
            raise CapacityError(f"pool rule {self.name} needs the use of all {experts} experts on clean text")
        mean = sum(float(u) for u in usage) / experts
        if not mean > 0:
            raise CapacityError(f"pool rule {self.name} needs clean text that reaches the experts; none was selected")
        return tuple(e for e in range(experts) if self.low * mean <= float(usage[e]) <= self.high * mean)
