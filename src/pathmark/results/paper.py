"""The paper's tables and figures: what each is about, how long ours takes, and the numbers that the paper prints.

Its pictures are not in its source, so of a figure only those numbers are here that its text names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from pathmark.errors import ResultError, instead

QWEN = "Qwen1.5-MoE-A2.7B"
"""The model of all tables that name none."""
COLUMNS = {"qwen2_moe": QWEN, "mixtral": "Mixtral-8x7B", "phimoe": "Phi-3.5-MoE", "qwen3_moe": "Qwen3-30B-A3B"}
"""Architecture -> the paper's model of that kind."""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """One table or figure."""

    name: str
    title: str
    place: str
    """Where it is in the paper."""
    minutes: float
    """About how long it takes on the bundled model with three keys on two idle cores, without the copies that several
    experiments share."""
    quick: float
    """The same with --quick, in this order, copies included."""
    differs: str
    """Where ours differs from the paper's, and why."""
    printed: Mapping[str, Mapping[str, Mapping[str, str]]]
    """Figure -> series -> place -> the number as printed."""
    by_model: Mapping[str, Mapping[str, Mapping[str, Mapping[str, str]]]]
    """The same for each of the paper's models, where it has several."""

    def beside(self, model: str) -> Mapping[str, Mapping[str, Mapping[str, str]]]:
        """The printed numbers for one of the paper's models; where it has one only, those."""
        return self.by_model.get(model, self.printed)

    def model(self, wanted: str) -> str:
        """Whose numbers those are."""
        return wanted if wanted in self.by_model else QWEN


@cache
def papers() -> dict[str, Paper]:
    """All, in the order of the paper."""
    found: dict[str, Any] = tomllib.loads(files("pathmark.results").joinpath("paper.toml").read_text(encoding="utf-8"))
    return {
        name: Paper(name=name, **{"printed": {}, "by_model": {}, "differs": "", **entry})
        for name, entry in found.items()
    }


def find_paper(name: str) -> Paper:
    """One by name, or a refusal that says which is meant."""
    if name not in papers():
        raise ResultError(f"there is no experiment {name!r}; {instead(name, list(papers()))}")
    return papers()[name]
