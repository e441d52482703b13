"""What every scheme is: a config with its secret, a function that marks a model and one that looks for the mark."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from transformers import PreTrainedModel

from pathmark.errors import CapacityError, instead
from pathmark.keys.derive import SECRET_BYTES
from pathmark.keys.schemekey import SchemeKey
from pathmark.progress import Progress
from pathmark.stats import GRINDING_BITS, Rate, bonferroni
from pathmark.verdicts import Anchor, Criteria, Verdict

UNDATED = Anchor(False, "no commitment was given", GRINDING_BITS)
"""Secrets of other schemes cannot be committed to here, so a third party charges them all that it may."""


@dataclass(frozen=True, kw_only=True)
class SchemeConfig:
    """What the configs of all schemes share. Fields of a scheme are numbers, truth values and texts with a default."""

    secret: bytes = field(repr=False)
    """Everything random of the mark is derived from these 32 bytes."""
    vocabulary: int
    """Tokens that the owner's model knows."""

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise ValueError(f"a secret has {SECRET_BYTES} bytes, got {len(self.secret)}")
        hints = get_type_hints(type(self))
        for known in fields(self):
            value = getattr(self, known.name)
            if known.name != "secret" and not _fits(value, hints[known.name]):
                raise ValueError(f"{known.name} must be {_named(hints[known.name])}, got {value!r}")
        self.require(self.vocabulary >= 2, "a vocabulary has at least 2 tokens", "vocabulary")

    def require(self, holds: bool, expected: str, *names: str) -> None:
        """Refuse values, in the words of what was expected."""
        if not holds:
            raise ValueError(f"{expected}, got {', '.join(f'{name} {getattr(self, name)}' for name in names)}")


C = TypeVar("C", bound=SchemeConfig)


class Scheme(Protocol[C]):
    """A way to mark a model and to find the mark. Any object with these is one; `register` gives it its name."""

    name: str
    summary: str
    """One sentence."""
    config: type[C]
    in_weights: bool
    """Whether the mark is in the weights, where attacks on them can reach it."""

    def embed(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        config: C,
        texts: Sequence[str],
        *,
        progress: Progress | None = None,
    ) -> PreTrainedModel:
        """A marked copy; the model that goes in is left alone. `texts` are ordinary ones to train on."""

    def verify(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        config: C,
        probes: Sequence[str],
        *,
        criteria: Criteria | None = None,
        progress: Progress | None = None,
    ) -> Verdict:
        """Whether the mark is there. `probes` are ordinary texts that nobody trained on."""


@dataclass(frozen=True, kw_only=True)
class SchemeVerdict(Verdict):
    """The verdict of a scheme that is not ours: the core, its success rate, and the figures that it goes by."""

    scheme: str
    wsr: Rate
    """The scheme's own success rate."""
    counted: str
    """What that rate counts, in a few words."""
    examined: str
    """What was looked at, in one sentence."""
    figures: Mapping[str, float]
    """Further measures by name."""

    def _examined(self) -> str:
        return self.examined

    def _figures(self) -> list[str]:
        more = [f"{name.replace('_', ' ')} {value:.6g}" for name, value in self.figures.items()]
        return [*super()._figures(), f"{self.counted}: {self.wsr}", *more]

    def summary(self) -> dict[str, Any]:
        """The object that scheme.schema.json documents."""
        own = {"scheme": self.scheme, "wsr": self.wsr.summary(), "counted": self.counted, "figures": dict(self.figures)}
        return {**super().summary(), **own}


def judged(verdict: SchemeVerdict) -> SchemeVerdict:
    """A verdict whose p-values are still uncorrected: charged for its family, and undecided where it had to be."""
    criteria = verdict.criteria if verdict.criteria.anchor is not None else replace(verdict.criteria, anchor=UNDATED)
    p, floor = (None if p is None else bonferroni(p, criteria.family) for p in (verdict.p, verdict.p_floor))
    lowest = None if floor is None else criteria.deciding(floor)
    level, why = criteria.significance, None
    if lowest is not None and lowest.value > level:
        why = f"this scheme could not reach the level {level:g} here: its smallest p-value is {lowest}"
    return replace(verdict, criteria=criteria, p=p, p_floor=floor, undecided=why)


def configure(scheme: Scheme[C], key: SchemeKey, **changes: Any) -> C:
    """The config of a scheme from its key; a refusal of other schemes' keys, of names and of values."""
    if key.scheme != scheme.name:
        raise CapacityError(f"this key is of the scheme {key.scheme}, expected {scheme.name}; name it with --scheme")
    settings = {**key.settings, **changes}
    known = [known.name for known in fields(scheme.config) if known.name != "secret"]
    for name in settings:
        if name not in known:
            raise CapacityError(f"{scheme.name} has no setting {name!r}; {instead(name, known)}")
    try:
        return scheme.config(secret=key.secret, **settings)
    except (TypeError, ValueError) as error:
        raise CapacityError(f"{scheme.name}: {error}") from error


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a setting is of its kind; whole numbers do as numbers, truth values as neither."""
    return any(type(value) is kind or (kind is float and type(value) is int) for kind in _kinds(hint))


def _named(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    return " or ".join(names.get(kind, str(kind)) for kind in _kinds(hint))
