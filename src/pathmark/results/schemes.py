"""A robustness run on the mark of another scheme than ours: its own rate and p-value after each attack."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pathmark.results.header import Header, read_result
from pathmark.results.robustness import Carried, Unmeasured
from pathmark.stats import Rate

FORMAT, VERSION = "pathmark-scheme-robustness", 1


@dataclass(frozen=True, kw_only=True)
class SchemeMeasured(Carried):
    """A case by the scheme's own measure."""

    wsr: Rate
    p_value: float
    log10_p: float


@dataclass(frozen=True, kw_only=True)
class SchemeRobustness:
    """A suite of attacks on one model that a scheme has marked."""

    header: Header
    scheme: str
    counted: str
    """What the rate counts."""
    corpus: str
    """Name of the thief's texts."""
    n_texts: int
    rows: tuple[SchemeMeasured | Unmeasured, ...] = ()


def read_scheme_robustness(path: Path) -> SchemeRobustness:
    """The result of such a run, or a refusal of the file."""
    return read_result(path, SchemeRobustness, FORMAT, VERSION)
