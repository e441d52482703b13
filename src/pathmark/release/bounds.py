"""What makes a copy fit for release: each figure of the check beside its bound, with what to try where it fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pathmark.stats import Rate


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One figure, what it must be, and whether it is."""

    figure: str
    found: str
    bound: str
    held: bool
    try_: str
    """What to try where it does not hold."""

    @property
    def problem(self) -> str:
        """Why a copy that breaks this bound is not fit for release."""
        return f"{self.figure}: {self.found}, expected {self.bound}"

    def summary(self) -> dict[str, Any]:
        """JSON object."""
        return {
            "figure": self.figure, "found": self.found, "bound": self.bound, "held": self.held, "try": self.try_
        }  # fmt: skip


def always(figure: str, rate: Rate, try_: str) -> Bound:
    """Every trial must be a hit."""
    return Bound(figure=figure, found=str(rate), bound="always", held=rate.hits == rate.n, try_=try_)


def never(figure: str, rate: Rate, try_: str) -> Bound:
    """No trial may be a hit."""
    return Bound(figure=figure, found=str(rate), bound="never", held=rate.hits == 0, try_=try_)


def at_least(figure: str, rate: Rate, least: float, try_: str) -> Bound:
    """A share of the trials must be hits."""
    bound = f"at least {100 * least:.0f} %"
    return Bound(figure=figure, found=str(rate), bound=bound, held=rate.value >= least, try_=try_)


def at_most(figure: str, rate: Rate, most: float, try_: str) -> Bound:
    """Only a share of the trials may be hits."""
    bound = f"at most {100 * most:.0f} %"
    return Bound(figure=figure, found=str(rate), bound=bound, held=rate.value <= most, try_=try_)
