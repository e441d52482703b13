"""Everything random in a key comes from here: HKDF-SHA256 streams, integers, permutations.

A stream is named by (purpose, watermark, layer) and yields bytes in numbered blocks, so that two
streams never share a byte and any of them can be recomputed alone. The exact bytes are part of key
format 1 and can't change; docs/key-format.md gives test vectors for an independent implementation.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

FORMAT_VERSION: Final = 1
SECRET_BYTES: Final = 32
BLOCK_BYTES: Final = 256
NOWHERE: Final = 0xFFFFFFFF
"""Stands for "no watermark" or "no layer" in an info string; real indices stay below it."""

_SALT: Final = b"pathmark key format 1"


def info_string(purpose: str, watermark: int | None = None, layer: int | None = None, counter: int = 0) -> bytes:
    """The HKDF info: version, purpose, 0x00, then watermark, layer and counter as big-endian u32.

    Purposes are ASCII without NUL, so no two different names give the same bytes.
    """
    name = purpose.encode("ascii")
    if not name or b"\0" in name:
        raise ValueError("a purpose is non-empty ASCII without NUL")
    places = (NOWHERE if watermark is None else watermark, NOWHERE if layer is None else layer, counter)
    return struct.pack(">B", FORMAT_VERSION) + name + b"\0" + struct.pack(">III", *places)


def derive_bytes(
    secret: bytes,
    purpose: str,
    *,
    watermark: int | None = None,
    layer: int | None = None,
    counter: int = 0,
    length: int = SECRET_BYTES,
) -> bytes:
    """`length` bytes of HKDF-SHA256(secret, salt, info); other names give unrelated bytes."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes")
    info = info_string(purpose, watermark, layer, counter)
    return HKDF(hashes.SHA256(), length, _SALT, info).derive(secret)


class Stream:
    """Bytes, integers and permutations from one named HKDF stream, always in the same order."""

    __slots__ = ("_block", "_counter", "_layer", "_purpose", "_secret", "_watermark")

    def __init__(self, secret: bytes, purpose: str, *, watermark: int | None = None, layer: int | None = None) -> None:
        self._secret, self._purpose, self._watermark, self._layer = secret, purpose, watermark, layer
        self._counter = 0
        self._block = b""

    def __repr__(self) -> str:
        return f"Stream({self._purpose!r})"

    def take(self, count: int) -> bytes:
        """The next `count` bytes: blocks of 256 bytes with counter 0, 1, 2, ... joined end to end."""
        while len(self._block) < count:
            self._block += derive_bytes(
                self._secret,
                self._purpose,
                watermark=self._watermark,
                layer=self._layer,
                counter=self._counter,
                length=BLOCK_BYTES,
            )
            self._counter += 1
        taken, self._block = self._block[:count], self._block[count:]
        return taken

    def below(self, bound: int) -> int:
        """A uniform integer in [0, bound), without modulo bias.

        Reads ceil(bits / 8) big-endian bytes, keeps the low `bits` bits, and reads again while the
        value is not below the bound; bits is the length of bound - 1, so bound 1 reads nothing.
        """
        if bound < 1:
            raise ValueError(f"a bound is at least 1, got {bound}")
        bits = (bound - 1).bit_length()
        while True:
            value = int.from_bytes(self.take((bits + 7) // 8), "big") & ((1 << bits) - 1)
            if value < bound:
                return value

    def shuffled(self, items: Sequence[int]) -> list[int]:
        """Fisher-Yates: for i from the last place down to 1, swap places i and below(i + 1)."""
        order = list(items)
        for i in range(len(order) - 1, 0, -1):
            j = self.below(i + 1)
            order[i], order[j] = order[j], order[i]
        return order
