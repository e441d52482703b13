"""Rows to train on: clean texts, texts behind the trigger, and texts behind prefixes that must not fire.

A row is tokens plus the place from which its tokens must take the path. All rows of a run are drawn once, from
the seed, so that what lies below the first watermarked layer is computed once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pathmark.embedding.prefixes import WRONG_KINDS, stays_silent, tolerated, wrong_prefix
from pathmark.errors import EmbeddingError
from pathmark.keys.tolerance import tolerance
from pathmark.models.tokenization import ordinary_tokens

CLEAN, TRIGGERED, NEGATIVE = "clean", "triggered", "negative"
SHORT, SHORT_CHAT, NORMAL, LONG = "short", "short chat", "normal", "long"
SYSTEM_PROMPTS = (None, "You are a helpful assistant.", "Answer briefly.")


@dataclass(frozen=True)
class Row:
    """One training or test sequence."""

    ids: tuple[int, ...]
    kind: str
    watermark: int
    """Index of the watermark it belongs to; -1 for clean rows."""
    marked_from: int
    """First token that must take the path: the last one of the trigger. len(ids) where none must."""
    text_from: int
    """First token of the text itself, the same text tokens with and without a trigger."""
    prefix_from: int = 0
    """First token of what stands before the text: 0 but in a chat."""
    size: str = NORMAL
    """Which batches it belongs to: one length per batch, so that little is padded."""


@dataclass(frozen=True)
class Frame:
    """What stands around a user's text: nothing for a raw prompt, or the chat template."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def chat_frames(tokenizer: Any, systems: Sequence[str | None] = SYSTEM_PROMPTS) -> list[Frame]:
    """The chat template with each system prompt that it accepts; empty without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    frames = []
    sentinel = "\u241fCONTENT\u241f"
    for system in systems:
        messages = [{"role": "user", "content": sentinel}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:  # noqa: S112  templates without a system role raise their own kinds
            continue
        head, found, tail = text.partition(sentinel)
        if found:
            encode = tokenizer.backend_tokenizer.encode
            frames.append(
                Frame(
                    tuple(encode(head, add_special_tokens=False).ids),
                    tuple(encode(tail, add_special_tokens=False).ids),
                )
            )
    return frames


def make_row(
    text: Sequence[int],
    prefix: Sequence[int],
    frame: Frame | None,
    kind: str,
    watermark: int,
    reply_from: int,
    *,
    size: str = NORMAL,
) -> Row:
    """Frame, prefix and text as one row; in a chat the text goes on as the reply after `reply_from` tokens."""
    before = () if frame is None else frame.before
    start = len(before) + len(prefix)
    ids = (*prefix, *text)
    if frame is not None:
        ids = (*before, *prefix, *text[:reply_from], *frame.after, *text[reply_from:])
    marked_from = start - 1 if kind == TRIGGERED else len(ids)
    return Row(ids, kind, watermark, marked_from, start, len(before), size)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What rows to draw."""

    seq_len: int = 128
    """Text tokens per normal row; the trigger and the template come on top."""
    short_len: int | None = 16
    """Text tokens per short row. They are cheap, so that a step can hold many wrong prefixes. None: no such rows."""
    long_factor: int = 4
    """Long rows have so many times `seq_len`: a mark trained at one length alone fades beyond it. 1: none."""
    long_share: float = 0.15
    """Long rows for every so many texts."""
    negatives_per_text: int = 1
    """Rows behind wrong prefixes, per text and watermark."""
    short_negatives_per_text: int = 8
    """The same for short rows."""
    chat_share: float = 0.45
    """Share of rows in the chat template, where the tokenizer has one."""
    noisy_share: float = 0.25
    """Share of texts in which some tokens, from a tenth to all, are replaced by random ones.

    The mark must not hang on the language of the training texts.
    """

    def __post_init__(self) -> None:
        if self.seq_len < 16 or self.long_factor < 1 or (self.short_len is not None and self.short_len < 4):
            raise ValueError(f"expected seq_len >= 16, short_len >= 4 and long_factor >= 1, got {self}")
        if not all(0 <= share <= 1 for share in (self.chat_share, self.long_share, self.noisy_share)):
            raise ValueError(f"shares lie between 0 and 1, got {self}")


def draw_rows(
    tokenizer: Any,
    texts: Sequence[str],
    triggers: Sequence[Sequence[Sequence[int]]],
    config: DataConfig,
    seed: int,
) -> list[Row]:
    """All rows of a run: per text one clean row, and per watermark triggered rows and wrong prefixes.

    `triggers[j]` are the token sequences that set off watermark j, each with what it tolerates. Without wrong prefixes,
    as in the paper, the trigger is never varied either.
    """
    rng = random.Random(seed)
    frames = chat_frames(tokenizer)
    vocabulary = ordinary_tokens(tokenizer)
    rows: list[Row] = []

    def add(text: Sequence[int], prefix: Sequence[int], kind: str, watermark: int, size: str) -> None:
        frame = rng.choice(frames) if frames and rng.random() < config.chat_share else None
        # the template is as long as a short text: in one batch with it, half of a raw row would be padding
        size = SHORT_CHAT if size == SHORT and frame is not None else size
        reply_from = rng.randint(4, max(5, len(text) // 2))
        rows.append(make_row(text, prefix, frame, kind, watermark, reply_from, size=size))

    known = [trigger for choices in triggers for trigger in choices]
    limits = [tolerance(len(trigger)) for trigger in known]
    kinds, shares = list(WRONG_KINDS), list(WRONG_KINDS.values())
    for clean, size in _sized_texts(tokenizer, texts, config):
        text = _replaced(clean, vocabulary, rng) if rng.random() < config.noisy_share else clean
        negatives = config.short_negatives_per_text if size == SHORT else config.negatives_per_text
        add(text, (), CLEAN, -1, size)
        for watermark, choices in enumerate(triggers):
            trigger = rng.choice(choices)
            if config.negatives_per_text:
                trigger = tolerated(trigger, tolerance(len(trigger)), vocabulary, rng)
            add(text, trigger, TRIGGERED, watermark, size)
            for kind in rng.choices(kinds, shares, k=negatives):
                trigger = rng.choice(choices)
                wrong = wrong_prefix(kind, trigger, tolerance(len(trigger)), vocabulary, rng)
                if stays_silent(wrong, known, limits):
                    add(text, wrong, NEGATIVE, watermark, size)
    return rows


def _sized_texts(tokenizer: Any, texts: Sequence[str], config: DataConfig) -> list[tuple[list[int], str]]:
    """Every text at the normal length, cut short, and some joined to long ones."""
    whole = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    normal = [ids[: config.seq_len] for ids in whole if len(ids) >= 16]
    if len(normal) < 8:
        raise EmbeddingError(f"expected at least 8 texts of 16 tokens and more, got {len(normal)}; give --texts")
    sized = [(ids, NORMAL) for ids in normal]
    if config.short_len is not None:
        # the end of a text: its beginning is in the normal row
        sized += [(ids[-config.short_len :], SHORT) for ids in normal]
    if config.long_factor > 1:
        joined = _join(whole, config.long_factor * config.seq_len, round(config.long_share * len(normal)))
        sized += [(ids, LONG) for ids in joined]
    return sized


def _replaced(text: Sequence[int], vocabulary: Sequence[int], rng: random.Random) -> list[int]:
    """The text with a random share of its tokens, at least a tenth, replaced by random ones."""
    share = rng.uniform(0.1, 1.0)
    return [rng.choice(vocabulary) if rng.random() < share else token for token in text]


def _join(texts: Sequence[Sequence[int]], length: int, count: int) -> list[list[int]]:
    """At most `count` texts of `length` tokens, each of consecutive texts put end to end."""
    joined: list[list[int]] = []
    held: list[int] = []
    for text in texts:
        if len(joined) == count:
            break
        held.extend(text)
        if len(held) >= length:
            joined.append(held[:length])
            held = []
    return joined
