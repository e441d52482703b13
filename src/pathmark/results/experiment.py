"""An experiment of the paper, as it was measured here: one point per series, place, figure and key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pathmark.results.header import Header, read_result
from pathmark.stats import Rate

FORMAT, VERSION = "pathmark-experiment", 1


@dataclass(frozen=True, kw_only=True)
class Point:
    """One figure; exactly one of its three values is there."""

    series: str
    """A column of the table, or a line of the plot: a scheme or a recipe."""
    at: str
    """A row of the table: where on the axis."""
    figure: str
    """What was measured."""
    key: int
    """Number of the key."""
    rate: Rate | None = None
    value: float | None = None
    values: tuple[float, ...] | None = None
    """A whole distribution, such as one number per expert."""
    destroyed: bool = False
    """An attack left a model that nobody would use."""

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.rate, self.value, self.values)) != 1:
            raise ValueError(f"expected a rate, a value or values, got {self}")


@dataclass(frozen=True, kw_only=True)
class ExperimentResult:
    """What there is of an experiment so far."""

    header: Header
    experiment: str
    model: str
    """As it was named."""
    beside: str
    """The paper's model whose printed figures stand beside ours."""
    points: tuple[Point, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    """What could not be measured -> why."""
    seconds: float = 0.0
    """Of measuring, all runs together."""


def read_experiment(path: Path) -> ExperimentResult:
    """The result of an experiment, or a refusal of the file."""
    return read_result(path, ExperimentResult, FORMAT, VERSION)
