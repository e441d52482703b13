"""Replies, and the rule by which a reply holds a mark. The rule is fixed before anything is sent.

Only the first `max_tokens` words of a reply are read, whatever the server sent; an echo of the prompt is taken
off first. At each word a mark may begin and have 1 to J words (J: its tokens), bare or in punctuation. So a
reply can hold at most `max_starts` of all possible marks, however long it is and whatever it lists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pathmark.keys import Phrase, TriggerRef
from pathmark.verification.blackbox.trials import Endpoint, Query

_AROUND: Final = "\"'`*_.,;:!?()[]{}<>-"
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


@dataclass(frozen=True)
class Reading:
    """What the rule sees in a reply."""

    words: int
    """Words that were read, without the echo."""
    echo: bool
    overlong: bool
    """Whether the server sent more words than tokens were asked for."""
    marks: tuple[TriggerRef, ...]
    """Every mark of the key that the reply holds, by its trigger."""


def read_reply(text: str, prompt: str, marks: Mapping[TriggerRef, Phrase], max_tokens: int) -> Reading:
    """Apply the rule."""
    words, asked = text.split(), prompt.split()
    echo = words[: len(asked)] == asked
    if echo:
        words = words[len(asked) :]
    overlong = len(words) > max_tokens
    words = words[:max_tokens]
    found = tuple(ref for ref, mark in marks.items() if _holds(words, mark.text.split()))
    return Reading(len(words), echo, overlong, found)


def max_starts(mark: Phrase, max_tokens: int) -> int:
    """Possible marks that one reply can hold at most: starts x numbers of words x bare or in punctuation."""
    return max_tokens * len(mark.tokens) * 2


def shape(text: str) -> str:
    """A reply without what changes from request to request, such as numbers and ids."""
    return " ".join(_HEX.sub(lambda run: "#" if any(map(str.isdigit, run[0])) else run[0], text).split())


def _holds(words: Sequence[str], mark: Sequence[str]) -> bool:
    wanted = " ".join(mark)
    for start in range(len(words) - len(mark) + 1):
        here = " ".join(words[start : start + len(mark)])
        if wanted in (here, here.strip(_AROUND)):
            return True
    return False
