"""How a long run speaks to its caller: stages, and units done within them."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """What a progress bar has to understand."""

    def stage(self, name: str, total: int | None) -> None:
        """A new stage of so many units begins."""

    def advance(self, units: int, note: str = "") -> None:
        """Some units are done; `note` replaces the stage's remark."""


class Silent:
    """Says nothing."""

    def stage(self, name: str, total: int | None) -> None:
        """Nothing."""

    def advance(self, units: int, note: str = "") -> None:
        """Nothing."""
