"""Triggers and marks as recorded in a key: text, tokens, and how they were drawn.

A drawn phrase picks one candidate per position. The key keeps the number of candidates and the drawn
indices, so its bits and its derivation can be checked without the tokenizer; the digest says which
candidate lists were meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from pathmark.keys.canonical import Document
from pathmark.keys.derive import Stream
from pathmark.keys.tolerance import secret_bits, tolerance


@dataclass(frozen=True, repr=False)
class Phrase:
    """A trigger or a mark. Its repr hides the text: phrases are secret until they are used."""

    text: str
    tokens: tuple[int, ...]
    choices: tuple[int, ...] | None = None
    """Index into the candidates of each position; None for free text."""
    counts: tuple[int, ...] = ()
    """Candidates that survived filtering, per position."""
    attempt: int = 0
    """Which draw was the first stable one, counted from 1; 0 for free text."""
    candidates: str = ""
    """Digest of the candidate lists."""

    def __post_init__(self) -> None:
        if self.choices is None:
            return
        if not len(self.choices) == len(self.counts) == len(self.tokens) or self.attempt < 1:
            raise ValueError("a drawn phrase has one choice and one count per token, and an attempt")
        if any(not 0 <= c < n for c, n in zip(self.choices, self.counts, strict=True)):
            raise ValueError("a choice is outside its candidates")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.tokens)} tokens, hidden)"

    @property
    def derived(self) -> bool:
        """Whether the phrase was drawn from the key, not given as free text."""
        return self.choices is not None

    @property
    def bits(self) -> float | None:
        """Bits that an unknowing model would have to guess; None for free text.

        log2 of the number of candidate tuples, less log2(i * (i + 1)) for a phrase accepted at draw i.
        For any x, P(phrase = x and draw i accepted) <= 1 / tuples, and the shares 1 / (i (i + 1)) sum
        to one over i: the charge makes the bound hold whatever share of tuples is stable.
        """
        if self.choices is None:
            return None
        return sum(log2(n) for n in self.counts) - log2(self.attempt * (self.attempt + 1))

    def record(self) -> Document:
        """JSON form."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "choices": None if self.choices is None else list(self.choices),
            "counts": list(self.counts),
            "attempt": self.attempt,
            "candidates": self.candidates,
        }

    @classmethod
    def from_record(cls, record: Document) -> Phrase:
        """Inverse of record()."""
        choices = record["choices"]
        return cls(
            text=str(record["text"]),
            tokens=tuple(int(t) for t in record["tokens"]),
            choices=None if choices is None else tuple(int(c) for c in choices),
            counts=tuple(int(c) for c in record["counts"]),
            attempt=int(record["attempt"]),
            candidates=str(record["candidates"]),
        )


@dataclass(frozen=True, repr=False)
class Trigger:
    """A trigger and the verification mark that a black-box model answers it with."""

    phrase: Phrase
    mark: Phrase

    def __repr__(self) -> str:
        return f"Trigger({len(self.tokens)} tokens, hidden)"

    @property
    def text(self) -> str:
        """The text to send in front of a prompt, or alone."""
        return self.phrase.text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the text."""
        return self.phrase.tokens

    @property
    def bits(self) -> float | None:
        """See Phrase.bits."""
        return self.phrase.bits

    @property
    def mark_bits(self) -> float | None:
        """Bits of the mark that a model which only obeys its prompt has to guess; None where nothing bounds chance.

        That is so for free text, of the mark or of the trigger: "write this down: ..." makes any chatbot say its mark.
        A word of the mark that stands in the trigger too counts nothing.
        """
        words, heard = self.mark.text.lower().split(), set(self.phrase.text.lower().split())
        if self.mark.bits is None or not self.phrase.derived:
            return None
        if len(words) != len(self.mark.counts):  # words and tokens do not pair up: then none may be heard
            return None if heard & set(words) else self.mark.bits
        given = sum(log2(count) for word, count in zip(words, self.mark.counts, strict=True) if word in heard)
        return max(0.0, self.mark.bits - given)

    @property
    def secret_bits(self) -> float | None:
        """What is left of them where a guess need not be right in every place (see `tolerance`); None for free text."""
        if self.bits is None:
            return None
        left = secret_bits(self.phrase.counts, tolerance(len(self.tokens)).silent)
        return left - log2(self.phrase.attempt * (self.phrase.attempt + 1))

    def record(self) -> Document:
        """JSON form."""
        return {"trigger": self.phrase.record(), "mark": self.mark.record()}

    @classmethod
    def from_record(cls, record: Document) -> Trigger:
        """Inverse of record()."""
        return cls(Phrase.from_record(record["trigger"]), Phrase.from_record(record["mark"]))


def draw_choices(
    subkey: bytes, kind: str, watermark: int, number: int, attempt: int, counts: Sequence[int]
) -> tuple[int, ...]:
    """One candidate index per position: stream `kind/number/attempt` of the watermark's subkey."""
    stream = Stream(subkey, f"{kind}/{number}/{attempt}", watermark=watermark)
    return tuple(stream.below(count) for count in counts)
