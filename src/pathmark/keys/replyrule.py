"""The rule by which a reply holds a mark, fixed before anything is sent; whoever reads a transcript can apply it again.

Only the first `max_tokens` words of a reply are read, whatever the server sent; an echo of the prompt is taken
off first. At each word a mark may begin and have 1 to J words (J: its tokens), bare or in punctuation. So a
reply can hold at most `max_starts` of all possible marks, however long it is and whatever it lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pathmark.keys.ledger import TriggerRef
from pathmark.keys.phrase import Phrase

_AROUND: Final = "\"'`*_.,;:!?()[]{}<>-"


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


def _holds(words: Sequence[str], mark: Sequence[str]) -> bool:
    wanted = " ".join(mark)
    for start in range(len(words) - len(mark) + 1):
        here = " ".join(words[start : start + len(mark)])
        if wanted in (here, here.strip(_AROUND)):
            return True
    return False
