"""Every scheme by name; `register` adds one from anybody's code."""

from __future__ import annotations

from typing import Any

from pathmark.baselines.eaaw import EaaW
from pathmark.baselines.ifmark import IFMark
from pathmark.baselines.kgw import Kgw
from pathmark.baselines.learnmark import LearnMark
from pathmark.baselines.scheme import Scheme
from pathmark.errors import CapacityError, instead

SCHEMES: dict[str, Scheme[Any]] = {}
"""Name -> scheme, in the paper's order; then those that were added."""


def register(scheme: Scheme[Any]) -> None:
    """Add a scheme; a name is given once."""
    if scheme.name in SCHEMES or scheme.name == "pathmark":
        raise CapacityError(f"there is a scheme {scheme.name} already; choose another name")
    SCHEMES[scheme.name] = scheme


def find_scheme(name: str) -> Scheme[Any]:
    """A scheme by name, or a refusal that says which is meant."""
    if name not in SCHEMES:
        raise CapacityError(f"there is no scheme {name!r}; {instead(name, list(SCHEMES))}")
    return SCHEMES[name]


for _scheme in (Kgw(), LearnMark(), IFMark(), EaaW()):
    register(_scheme)
