"""Texts to send to a model that only others can run: clean, triggered and decoyed, under ids that say nothing.

Which probe is which follows from the key alone: a probe's id is its place in the plan, encrypted under a key
derived from the owner's secret. So nothing else has to be kept, and the operator who runs the probes cannot tell
from the file which of several prefixes matters.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from pathmark.errors import VerificationError
from pathmark.keys import OwnerKey, TextCodec
from pathmark.keys.derive import derive_bytes
from pathmark.verification.decoys import decoy_triggers

_BLOCK = struct.Struct(">2sBHHII1x")
_MAGIC = b"pm"
_LEADS = ("", "\n")
"""Put in front of a text until its tokens stay the same behind a trigger; some tokenizers mark a text's start."""
_SHORTEN = 8
"""Tokens that may be cut off a text's end to find a place where it decodes and encodes to the same tokens."""
MIN_TOKENS = 4


class Variant(IntEnum):
    """What stands in front of a text."""

    CLEAN = 0
    TRIGGER = 1
    DECOY = 2


@dataclass(frozen=True)
class ProbePlace:
    """What a probe's id says to the holder of the key."""

    variant: Variant
    number: int
    """Watermark of a trigger, or number of a decoy; 0 for clean text."""
    trigger: int
    """Which of the watermark's triggers; 0 otherwise."""
    text: int
    """Index of the text in the plan."""
    n_tokens: int
    """Text tokens: those that are scored."""


@dataclass(frozen=True)
class Probe:
    """One prompt to send. Only `probe`, `text` and `token_ids` ever leave the owner."""

    probe: str
    text: str
    token_ids: tuple[int, ...]
    """The prompt as our tokenizer cuts it; in the chat template where that was asked for."""
    chat: bool = False
    """Whether the text is a user message for the chat template, or a raw prompt."""

    def record(self) -> dict[str, object]:
        """JSON line for the operator."""
        line: dict[str, object] = {"probe": self.probe, "text": self.text, "token_ids": list(self.token_ids)}
        return line | {"chat": True} if self.chat else line


@dataclass(frozen=True)
class ProbePlan:
    """Prompts in the order in which they are sent, and how many texts did not survive the way through text."""

    probes: tuple[Probe, ...]
    n_texts: int
    skipped: int
    n_tokens: int
    """Text tokens of all texts, each counted once."""


def probe_id(key: OwnerKey, place: ProbePlace) -> str:
    """32 hex digits. Law: read_probe_id(key, probe_id(key, place)) == place."""
    block = _BLOCK.pack(_MAGIC, place.variant, place.number, place.trigger, place.text, place.n_tokens)
    cipher = _cipher(key).encryptor()
    return (cipher.update(block) + cipher.finalize()).hex()


def read_probe_id(key: OwnerKey, probe: str) -> ProbePlace:
    """Inverse of probe_id; refuses ids that this key did not give out."""
    foreign = VerificationError(
        f"probe {probe[:40]!r} was not given out by this key; expected routes of texts from `pathmark probes`"
    )
    try:
        block = bytes.fromhex(probe)
    except ValueError:
        raise foreign from None
    if len(block) != _BLOCK.size:
        raise foreign
    cipher = _cipher(key).decryptor()
    plain = cipher.update(block) + cipher.finalize()
    magic, variant, number, trigger, text, n_tokens = _BLOCK.unpack(plain)
    if magic != _MAGIC or variant not in set(Variant) or plain[-1]:
        raise foreign
    return ProbePlace(Variant(variant), number, trigger, text, n_tokens)


def plan_probes(
    key: OwnerKey,
    codec: TextCodec,
    rows: Sequence[Sequence[int]],
    *,
    decoys: int = 2,
    trigger: int = 0,
    chat: bool = False,
) -> ProbePlan:
    """Every text clean, behind one trigger of each watermark, and behind decoys; shuffled by the key.

    A text is kept if its tokens come back from its text behind every one of those prefixes; its end may be cut by
    a few tokens to that purpose. Texts that cannot be kept are skipped and counted.
    """
    prefixes = _prefixes(key, codec, decoys, trigger)
    probes: list[Probe] = []
    kept = tokens = 0
    for number, row in enumerate(rows):
        stable = _stable(codec, row, [(front, head) for _, front, head in prefixes if head], chat)
        if stable is None:
            continue
        text, n_tokens = stable
        kept, tokens = kept + 1, tokens + n_tokens
        for (variant, which, place_trigger), front, _ in prefixes:
            place = ProbePlace(variant, which, place_trigger, number, n_tokens)
            ids = _prompt(codec, front + text, chat)
            probes.append(Probe(probe_id(key, place), front + text, tuple(ids), chat))
    if not kept:
        raise VerificationError(
            f"none of {len(rows)} texts keeps its tokens behind the key's trigger; try other --texts"
            + (" or without --chat" if chat else "")
        )
    random.Random(key.derive_seed("probe order")).shuffle(probes)
    return ProbePlan(tuple(probes), kept, len(rows) - kept, tokens)


_Prefix = tuple[tuple[Variant, int, int], str, tuple[int, ...]]


def _prefixes(key: OwnerKey, codec: TextCodec, decoys: int, trigger: int) -> list[_Prefix]:
    """((variant, number, trigger), text, tokens) of everything that is put in front of a text."""
    if codec.digest != key.model.tokenizer_digest:
        raise VerificationError("this is not the tokenizer that the key was made for; give the model's own")
    prefixes: list[_Prefix] = [((Variant.CLEAN, 0, 0), "", ())]
    for watermark in key.watermarks:
        if not 0 <= trigger < len(watermark.triggers):
            raise VerificationError(
                f"watermark {watermark.index} has {len(watermark.triggers)} trigger(s), counted from 0; got {trigger}"
            )
        phrase = watermark.triggers[trigger].phrase
        prefixes.append(((Variant.TRIGGER, watermark.index, trigger), phrase.text, phrase.tokens))
    for number, tokens in enumerate(decoy_triggers(key, codec, decoys) if decoys else ()):
        prefixes.append(((Variant.DECOY, number, 0), codec.decode(tokens), tokens))
    return prefixes


def _stable(
    codec: TextCodec, row: Sequence[int], fronts: Sequence[tuple[str, Sequence[int]]], chat: bool
) -> tuple[str, int] | None:
    """Text of the row's tokens and the number of tokens that are the same behind every prefix; None without one."""
    for lead in _LEADS:
        for cut in range(min(_SHORTEN, len(row) - MIN_TOKENS) + 1):
            text = lead + codec.decode(row[: len(row) - cut])
            counts = {_scored(codec, text, front, head, chat) for front, head in fronts}
            if len(counts) == 1 and (count := counts.pop()) is not None and count >= MIN_TOKENS:
                return text, count
    return None


def _scored(codec: TextCodec, text: str, front: str, head: Sequence[int], chat: bool) -> int | None:
    """Tokens of the text that stand behind this prefix as they stand without it; None if some do not."""
    plain = codec.encode(text)
    behind = codec.encode(front + text)
    if behind[: len(head)] != list(head):
        return None
    tail = behind[len(head) :]
    # A tokenizer that marks the start of a text may have a token more in front of the clean one.
    if not tail or plain[len(plain) - len(tail) :] != tail or len(plain) - len(tail) > 1:
        return None
    if chat:
        rendered = codec.render_chat(front + text, None)
        if rendered is None or _find(rendered, [*head, *tail]) is None:
            return None
    return len(tail)


def _prompt(codec: TextCodec, text: str, chat: bool) -> list[int]:
    rendered = codec.render_chat(text, None) if chat else codec.encode(text)
    assert rendered is not None  # _stable has rendered it
    return rendered


def _find(haystack: Sequence[int], needle: Sequence[int]) -> int | None:
    n, wanted = len(needle), list(needle)
    return next((i for i in range(len(haystack) - n + 1) if list(haystack[i : i + n]) == wanted), None)


def _cipher(key: OwnerKey) -> Cipher[modes.ECB]:
    # One block per id and no two ids with the same content: the block cipher itself is what is wanted.
    secret = derive_bytes(key.secret.reveal(), "probe ids", length=16)
    return Cipher(algorithms.AES(secret), modes.ECB())  # noqa: S305
