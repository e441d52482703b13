"""Replies, and whoever gives them. The rule by which a reply holds a mark is in `keys.replyrule`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pathmark.verification.blackbox.trials import Endpoint, Query

_HEX: Final = re.compile(r"[0-9a-fA-F-]+")


@dataclass(frozen=True)
class Reply:
    """What a model said."""

    text: str
    finish_reason: str | None = None
    """`stop`, `length` or another word of the server; None where it said nothing."""
    routes: Any = None
    """Routing that the server returned with the reply, as it came; None from most servers."""


@dataclass(frozen=True)
class Failure:
    """A request that got no usable answer, and why."""

    reason: str


class Backend(Protocol):
    """Whoever answers queries: an HTTP client or a model in memory."""

    @property
    def host(self) -> str:
        """Who sees the requests."""
        ...

    @property
    def model(self) -> str:
        """Name of the model there."""
        ...

    @property
    def discloses(self) -> bool:
        """Whether somebody else sees the triggers, so that the ledger has to know."""
        ...

    def prepare(self) -> Endpoint:
        """Find out how to ask, with a harmless request; VerificationError where nobody answers."""
        ...

    def ask(
        self,
        queries: Sequence[Query],
        max_tokens: int,
        *,
        sending: Callable[[Query], None],
        answered: Callable[[Query, Reply | Failure], None],
    ) -> None:
        """Ask all of them. `sending` is called before a query leaves, `answered` once for each."""
        ...


def shape(text: str) -> str:
    """A reply without what changes from request to request, such as numbers and ids."""
    return " ".join(_HEX.sub(lambda run: "#" if any(map(str.isdigit, run[0])) else run[0], text).split())
