"""What every attack is: a config whose options explain themselves, and a function from a model to what it leaves."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any, Generic, Literal, TypeVar, get_type_hints

from transformers import PreTrainedModel

from pathmark.attacks.kit import Kit
from pathmark.errors import AttackError, instead
from pathmark.keys import OwnerKey

Origin = Literal["paper", "beyond"]
Need = Literal["text", "another model", "marked layers", "target experts"]
C = TypeVar("C")
T = TypeVar("T")


def option(default: T, text: str) -> T:
    """A field of an attack's config: its default, and the sentence that `--help` shows."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, eq=False)
class Attacked:
    """What an attack leaves."""

    model: PreTrainedModel
    key: OwnerKey | None = None
    """The thief's own key, where it embedded one."""
    tokenizer: Any = None
    """The thief's own tokenizer, where the old one does not fit any more."""


Run = Callable[[PreTrainedModel, C, Kit], Attacked]
"""What every attack's function is like."""


@dataclass(frozen=True)
class Option:
    """A setting of an attack, as the command line offers it."""

    name: str
    kind: Any
    default: Any
    help: str


@dataclass(frozen=True)
class Attack(Generic[C]):
    """One attack, and what its adversary needs besides the weights."""

    name: str
    config: type[C]
    """Frozen dataclass whose every field is an `option`."""
    function: Run[C]
    """Leaves the model that goes in alone. Its docstring says what the adversary knows and needs."""
    origin: Origin
    """In the paper, or beyond it."""
    summary: str
    needs: tuple[Need, ...] = ()
    at_inference: bool = False
    """Acts while the model runs; there are no attacked weights to write."""

    @property
    def knowledge(self) -> str:
        """What it does, what the adversary knows and needs."""
        return inspect.getdoc(self.function) or ""

    def options(self) -> list[Option]:
        """The settings with their types, defaults and help."""
        hints = get_type_hints(self.config)
        return [Option(f.name, hints[f.name], f.default, f.metadata["help"]) for f in fields(self.config)]  # type: ignore[arg-type]

    def configure(self, **settings: Any) -> C:
        """The config with these settings, or a refusal of their names or values."""
        known = [option.name for option in self.options()]
        for name in settings:
            if name not in known:
                raise AttackError(f"{self.name} has no setting {name!r}; {instead(name, known)}")
        try:
            return self.config(**settings)
        except (TypeError, ValueError) as error:
            raise AttackError(f"{self.name}: {error}") from error

    def run(self, model: PreTrainedModel, config: C, kit: Kit) -> Attacked:
        """Carry it out; the model that goes in is not touched."""
        return self.function(model, config, kit)


def only_model(function: Callable[[PreTrainedModel, C, Kit], PreTrainedModel]) -> Run[C]:
    """A function that gives back nothing but the model, as an attack's."""

    @wraps(function)
    def run(model: PreTrainedModel, config: C, kit: Kit) -> Attacked:
        return Attacked(function(model, config, kit))

    return run
