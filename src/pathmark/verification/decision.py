"""The three ways in which a verification can end, and how a command says each."""

from __future__ import annotations

from typing import Literal

Decision = Literal["marked", "not marked", "undecided"]
EXIT_CODES: dict[Decision, int] = {"marked": 0, "not marked": 1, "undecided": 2}
AS_JSON: dict[Decision, bool | None] = {"marked": True, "not marked": False, "undecided": None}
