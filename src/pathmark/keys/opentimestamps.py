"""OpenTimestamps proofs (.ots): a digest led by hashing to the Merkle root of a Bitcoin block, whose header has a time.

The reader gives the block's header, taken from wherever the reader trusts. A header without much work in it is refused:
anybody could have made it.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from pathmark.errors import KeyFileError

MAGIC: Final = b"\x00OpenTimestamps\x00\x00Proof\x00\xbf\x89\xe2\xe8\x84\xe8\x92\x94"
MAX_PROOF, MAX_MESSAGE, MAX_DEPTH = 1 << 16, 4096, 256
"""Bounds on what is read, so that a hostile proof cannot start endless work."""
MIN_WORK = 1 << 75
"""Hashes that a header must stand for on average; every block of the chain since 2020 does."""
_BITCOIN: Final = bytes.fromhex("0588960d73d71901")
_SHA256, _APPEND, _PREPEND, _REVERSE, _HEXLIFY, _ATTESTATION, _FORK = 0x08, 0xF0, 0xF1, 0xF2, 0xF3, 0x00, 0xFF
_HASHES: Final = {0x02: "sha1", 0x03: "ripemd160", _SHA256: "sha256"}


@dataclass(frozen=True)
class BlockHeader:
    """80 bytes at the head of a block, with enough work in them."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != 80:
            raise KeyFileError(f"a block header has 80 bytes, got {len(self.raw)}; give them raw, or as 160 hex digits")
        size, mantissa = self.raw[75], int.from_bytes(self.raw[72:75], "little")
        target = mantissa << 8 * (size - 3) if size >= 3 else mantissa >> 8 * (3 - size)
        found = int.from_bytes(sha256(sha256(self.raw).digest()).digest(), "little")
        if found > target or not 0 < target <= (1 << 256) // MIN_WORK:
            raise KeyFileError("this block header has too little work in it for one of the Bitcoin chain since 2020")

    @property
    def merkle_root(self) -> bytes:
        """Over the block's transactions."""
        return self.raw[36:68]

    @property
    def time(self) -> datetime.datetime:
        """When the block's maker says it was made; the chain lets nobody lie by more than two hours."""
        return datetime.datetime.fromtimestamp(int.from_bytes(self.raw[68:72], "little"), datetime.UTC)


def load_headers(path: Path) -> list[BlockHeader]:
    """Block headers in a file: 80 raw bytes, or one per line in hex."""
    try:
        data = path.read_bytes()[:MAX_PROOF]
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None
    if len(data) == 80:
        return [BlockHeader(data)]
    try:
        return [BlockHeader(bytes.fromhex(line.decode("ascii"))) for line in data.split()]
    except ValueError:
        raise KeyFileError(f"{path} holds no block header; expected 80 bytes, or 160 hex digits per line") from None


def is_proof(data: bytes) -> bool:
    """Whether these bytes say that they are an OpenTimestamps proof."""
    return data.startswith(MAGIC)


def check_proof(proof: bytes, digest: bytes) -> None:
    """Raise KeyFileError unless this is a whole proof over the digest that ends in some block."""
    if not _roots(proof, digest):
        raise KeyFileError("this OpenTimestamps proof is not in a block yet; run `ots upgrade` on it some hours later")


def proven_times(proof: bytes, digest: bytes, headers: Sequence[BlockHeader]) -> list[datetime.datetime]:
    """Times of the given blocks that the proof leads to from the digest."""
    roots = _roots(proof, digest)
    return [header.time for header in headers if header.merkle_root in roots]


def _roots(proof: bytes, digest: bytes) -> set[bytes]:
    """Merkle roots of blocks that the proof leads to."""
    try:
        reader = _Reader(proof)
        if len(proof) > MAX_PROOF or reader.take(len(MAGIC)) != MAGIC or reader.number() != 1:
            raise ValueError
        kind, said = reader.byte(), reader.take(32)
        if kind == _SHA256 and said == digest:
            found = set(_walk(reader, digest, MAX_DEPTH))
            if reader.rest:
                raise ValueError
            return found
    except ValueError:
        raise KeyFileError("this is no whole OpenTimestamps proof; expected the .ots file of `ots stamp`") from None
    raise KeyFileError("this timestamp is over something else than this commitment")


def _walk(reader: _Reader, message: bytes, depth: int) -> Iterator[bytes]:
    """Follow every branch; a branch ends in an attestation, and those of Bitcoin count."""
    if depth == 0 or len(message) > MAX_MESSAGE:
        raise ValueError
    more = True
    while more:
        tag = reader.byte()
        more = tag == _FORK
        if more:
            tag = reader.byte()
        if tag == _ATTESTATION:
            kind = reader.take(8)
            reader.take(reader.number())
            if kind == _BITCOIN and len(message) == 32:
                yield message
        else:
            yield from _walk(reader, _step(reader, tag, message), depth - 1)


def _step(reader: _Reader, tag: int, message: bytes) -> bytes:
    """One operation on the message."""
    if tag in _HASHES:
        return hashlib.new(_HASHES[tag], message).digest()
    if tag == _APPEND:
        return message + reader.take(reader.number())
    if tag == _PREPEND:
        return reader.take(reader.number()) + message
    if tag == _REVERSE:
        return message[::-1]
    if tag == _HEXLIFY:
        return message.hex().encode()
    raise ValueError


class _Reader:
    """Bytes from the front, never beyond the end."""

    def __init__(self, data: bytes) -> None:
        self.rest = memoryview(data)

    def take(self, size: int) -> bytes:
        if size > min(len(self.rest), MAX_MESSAGE):
            raise ValueError
        taken, self.rest = bytes(self.rest[:size]), self.rest[size:]
        return taken

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self) -> int:
        """Seven bits a byte, lowest first."""
        value, shift = 0, 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 28:
                raise ValueError
