"""Drawing triggers and marks that survive the way through text.

At an API a trigger travels as text, so its tokens must come back from its text wherever it may stand:
at the start of a raw prompt and of a user message in the chat template, with and without a system
prompt, alone and with any text attached. Candidates are filtered one by one first, then whole phrases
are drawn until one is stable. Nothing else is ever a reason to draw again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import log2
from typing import Final, Protocol

from pathmark.errors import CapacityError
from pathmark.keys.canonical import canonical
from pathmark.keys.phrase import Phrase, draw_choices
from pathmark.keys.tolerance import FEWEST_TOKENS, MIN_SECRET_BITS, MOST_TOKENS, secret_bits, tolerance

FOLLOWING: Final = (
    *("the", "The", "a", "I", "ing", "s", "er", "http", "of"),
    *(" the", " The", " a", " I", "  two", " 7", " (", " \n"),
    *("7", "42", "2019", "007"),
    *("(", ")", ".", ",", "!", "?", '"', "'s", "-", "#", "/", ":", "...", "<", "@", "*", "=", "[", "_"),
    *("\n", "\n\n", "\nThe", "\r\n", "\t"),
)
"""Texts attached behind a trigger when its stability is tested: letters, spaces, digits, punctuation,
line breaks."""

SYSTEM_PROMPTS: Final = (None, "You are a helpful assistant.")
MARK_BITS: Final = 40
_MARK_MARGIN: Final = 16
MAX_ATTEMPTS: Final = 4096
_MIN_CANDIDATES: Final = 64
_DRAW_BITS: Final = 6.0
"""Kept in reserve for phrases that are accepted at a later draw, which costs bits."""
_MIN_TAILS: Final = 4
_FORMS: Final = (
    ("words", r" [A-Za-z]{2,}", r"[A-Za-z]{2,}"),
    ("printable", r" ?[!-~]+", r"[!-~]+"),
)
"""Rule, form of an inner piece, form of a head; the first that leaves enough candidates is used."""


class TextCodec(Protocol):
    """What drawing needs of a tokenizer. `pathmark.models.tokenization` has the real one."""

    @property
    def digest(self) -> str:
        """Digest of the vocabulary and merges."""
        ...

    def token_ids(self) -> Sequence[int]:
        """Ordinary tokens by rising id: no special and no added ones."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a raw text, nothing added."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens at the start of a text."""
        ...

    def piece(self, token: int) -> str:
        """What a token adds behind another one."""
        ...

    def render_chat(self, text: str, system: str | None) -> list[int] | None:
        """A user message in the chat template; None without a template or without its system role."""
        ...


@dataclass(frozen=True, repr=False)
class Candidates:
    """Tokens that may stand at the head, inside, and at the tail of a phrase."""

    head: tuple[int, ...]
    inner: tuple[int, ...]
    tail: tuple[int, ...]
    rule: str
    """Two words, for the inner tokens and for the tails.

    `words`: a space and letters, which no known tokenizer merges across; `printable`: any visible
    ASCII, for tokenizers without such tokens. `closed`: the last character is followed by nothing in
    any token of the vocabulary, so nothing can ever merge with it; `symbol`: it is no letter or digit;
    `tested`: it only passed the test with text attached."""

    @property
    def trigger_tokens(self) -> int:
        """How many tokens a trigger needs: enough of it is secret though a guess need not be right everywhere."""
        for length in range(FEWEST_TOKENS, MOST_TOKENS + 1):
            counts = [len(each) for each in self.places(length)]
            if secret_bits(counts, tolerance(length).silent) >= MIN_SECRET_BITS + _DRAW_BITS:
                return length
        raise CapacityError(
            f"this tokenizer leaves too few tokens for a trigger of {MIN_SECRET_BITS:.0f} secret bits; give a free "
            "text with --trigger"
        )

    def places(self, length: int) -> tuple[tuple[int, ...], ...]:
        """What may stand in each place of a trigger."""
        return (self.head, *(self.inner,) * (length - 2), self.tail)

    @property
    def digest(self) -> str:
        """sha256 over the three lists."""
        lists = {"head": self.head, "inner": self.inner, "tail": self.tail, "rule": self.rule}
        return sha256(canonical(lists)).hexdigest()


def find_candidates(codec: TextCodec) -> Candidates:
    """Filter the vocabulary: visible ASCII that encodes back to itself; tails also with text attached.

    Raises CapacityError for tokenizers that leave nothing to draw from.
    """
    pieces = {token: codec.piece(token) for token in codec.token_ids()}
    visible = {t: p for t, p in pieces.items() if p.isascii() and p.isprintable() and p.strip()}
    starts = {t: codec.decode([t]) for t in visible}
    for rule, inner_form, head_form in _FORMS:
        head = [t for t, s in starts.items() if re.fullmatch(head_form, s) and codec.encode(s) == [t]]
        if not head:
            continue
        front, front_text = head[0], starts[head[0]]
        inner = [
            t for t, p in visible.items() if re.fullmatch(inner_form, p) and codec.encode(front_text + p) == [front, t]
        ]
        if len(inner) < _MIN_CANDIDATES:
            continue
        if not any(_in_chat(codec, starts[t], [t]) for t in head[:20]):
            raise CapacityError(
                "no token stays the same at the start of a raw prompt and of a user message: this chat "
                "template puts user text where the tokenizer cuts it differently"
            )
        kind, tail = _find_tails(codec, pieces, visible, front, front_text)
        return Candidates(tuple(head), tuple(inner), tuple(tail), f"{rule} {kind}")
    raise CapacityError(
        f"this tokenizer leaves fewer than {_MIN_CANDIDATES} printable tokens that encode back to "
        "themselves; give free texts with --trigger FILE and --mark FILE"
    )


def unstable_contexts(codec: TextCodec, text: str, tokens: Sequence[int], *, limit: int = 8) -> list[str]:
    """Places where the text does not give the tokens; empty for a stable phrase.

    The first `limit` are named, such as `raw + ' the'` or `chat with system + '\\n'`.
    """
    found: list[str] = []
    for follow in ("", *FOLLOWING):
        if codec.encode(text + follow)[: len(tokens)] != list(tokens):
            found.append(f"raw + {follow!r}")
            if len(found) >= limit:
                return found
    for system in SYSTEM_PROMPTS:
        where = "chat" if system is None else "chat with system"
        for follow in ("", *FOLLOWING):
            rendered = codec.render_chat(text + follow, system)
            if rendered is None:
                break
            if not contains(rendered, tokens):
                found.append(f"{where} + {follow!r}")
                if len(found) >= limit:
                    return found
    return found


def draw_trigger(
    codec: TextCodec,
    candidates: Candidates,
    subkey: bytes,
    *,
    watermark: int,
    number: int,
    length: int,
    taken: Iterable[Sequence[int]] = (),
) -> Phrase:
    """Trigger `number` of a watermark: head, inner tokens, tail; stable everywhere and not `taken`."""
    if not 3 <= length <= 64:
        raise CapacityError(f"a trigger has 3 to 64 tokens, got {length}; leave it out to have it chosen")
    if not candidates.tail:
        raise CapacityError(
            "every token of this tokenizer merges with some text behind it, so no trigger is stable; "
            "give a free text with --trigger"
        )
    return _draw(codec, candidates.places(length), candidates.digest, subkey, "trigger", watermark, number, taken)


def draw_mark(
    codec: TextCodec,
    candidates: Candidates,
    subkey: bytes,
    *,
    watermark: int,
    number: int,
    taken: Iterable[Sequence[int]] = (),
) -> Phrase:
    """The mark of a trigger: as few words as give 40 bits with 16 to spare for repeated draws."""
    lists = [candidates.head]
    while sum(log2(len(c)) for c in lists) < MARK_BITS + _MARK_MARGIN:
        lists.append(candidates.inner)
    return _draw(codec, lists, candidates.digest, subkey, "mark", watermark, number, taken)


def free_phrase(codec: TextCodec, text: str) -> tuple[Phrase, list[str]]:
    """A phrase of the owner's own words and the contexts where it is not stable.

    Refused if the text is empty, has space around it, or loses its tokens even alone or before a word.
    """
    if not text or text != text.strip():
        raise CapacityError("a free text must not be empty nor begin or end with space: templates strip it")
    tokens = codec.encode(text)
    weak = unstable_contexts(codec, text, tokens, limit=1000)
    fatal = [place for place in weak if place.endswith(("+ ''", "+ ' the'"))]
    if fatal:
        raise CapacityError(f"this free text does not keep its tokens ({fatal[0]}); choose another one")
    return Phrase(text=text, tokens=tuple(tokens)), weak


def keeps_trigger(codec: TextCodec, phrase: Phrase, text: str) -> bool:
    """Whether the phrase keeps its tokens with exactly this text behind it."""
    return codec.encode(phrase.text + text)[: len(phrase.tokens)] == list(phrase.tokens)


def contains(haystack: Sequence[int], needle: Sequence[int]) -> bool:
    """Whether the needle occurs in one piece."""
    n, first = len(needle), list(needle)
    return any(list(haystack[i : i + n]) == first for i in range(len(haystack) - n + 1))


def _keeps(codec: TextCodec, text: str, tokens: list[int], following: Iterable[str]) -> bool:
    return all(codec.encode(text + follow)[: len(tokens)] == tokens for follow in following)


def _find_tails(
    codec: TextCodec, pieces: dict[int, str], visible: dict[int, str], front: int, front_text: str
) -> tuple[str, list[int]]:
    """The safest kind of tail that leaves a choice; see Candidates.rule. Rarer kinds are tested first:
    attaching every text to every token of a large vocabulary takes long."""
    followed = {c for p in pieces.values() for c in p[:-1]}
    forms: tuple[tuple[str, Callable[[str], bool]], ...] = (
        ("closed", lambda last: last not in followed),
        ("symbol", lambda last: not last.isalnum()),
        ("tested", lambda last: True),
    )
    for kind, fits in forms:
        tail = [
            t
            for t, p in visible.items()
            if p[-1] != " " and fits(p[-1]) and _keeps(codec, front_text + p, [front, t], ("", *FOLLOWING))
        ]
        if len(tail) >= _MIN_TAILS or kind == "tested":
            break
    return kind, tail


def _in_chat(codec: TextCodec, text: str, tokens: Sequence[int]) -> bool:
    rendered = (codec.render_chat(text, system) for system in SYSTEM_PROMPTS)
    return all(r is None or contains(r, tokens) for r in rendered)


def _draw(
    codec: TextCodec,
    lists: Sequence[Sequence[int]],
    digest: str,
    subkey: bytes,
    kind: str,
    watermark: int,
    number: int,
    taken: Iterable[Sequence[int]],
) -> Phrase:
    counts = tuple(len(candidates) for candidates in lists)
    used = {tuple(tokens) for tokens in taken}
    # A mark ends the reply: nothing is attached to it, and a model may answer it in any context.
    following = ("", *FOLLOWING) if kind == "trigger" else ("",)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        choices = draw_choices(subkey, kind, watermark, number, attempt, counts)
        tokens = tuple(candidates[c] for candidates, c in zip(lists, choices, strict=True))
        text = codec.decode(tokens)
        if tokens in used or text != text.strip() or not _keeps(codec, text, list(tokens), following):
            continue
        if kind == "trigger" and unstable_contexts(codec, text, tokens, limit=1):
            continue
        phrase = Phrase(text, tokens, choices, counts, attempt, digest)
        if kind == "mark" and (phrase.bits or 0) < MARK_BITS:
            break
        return phrase
    raise CapacityError(f"no stable {kind} in {MAX_ATTEMPTS} draws with this tokenizer; give a free text with --{kind}")
