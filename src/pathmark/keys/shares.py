"""Shamir's secret sharing over GF(256), with shares that can be printed and typed in again.

Any m of n shares give the secret back; m - 1 of them are uniformly random and say nothing. The field
is that of AES (x^8 + x^4 + x^3 + x + 1); each byte has its own random polynomial of degree m - 1 with
the byte as its value at 0, and share x holds the values at x. A printed share is base32 of: version,
m, x, two bytes that name the set, the values, and the first four bytes of sha256 over all of it.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from pathmark.errors import KeyFileError

_VERSION = 1
_MISTYPED = "a share is mistyped or incomplete (its check letters do not match); type it again"


@dataclass(frozen=True, repr=False)
class Share:
    """One share: a point on every byte's polynomial."""

    threshold: int
    x: int
    set_name: bytes
    values: bytes

    def __repr__(self) -> str:
        return f"Share({self.x}, any {self.threshold} restore, hidden)"

    def text(self) -> str:
        """For paper: groups of six letters and digits."""
        body = bytes([_VERSION, self.threshold, self.x]) + self.set_name + self.values
        letters = base64.b32encode(body + sha256(body).digest()[:4]).decode().rstrip("=")
        return "-".join(letters[i : i + 6] for i in range(0, len(letters), 6))

    @classmethod
    def parse(cls, text: str) -> Share:
        """Read a printed share; spaces, dashes and case do not matter, a slip of the pen is noticed."""
        letters = "".join(text.upper().replace("-", " ").split())
        try:
            raw = base64.b32decode(letters + "=" * (-len(letters) % 8))
        except ValueError:  # of which binascii.Error is one
            raw = b""
        body, check = raw[:-4], raw[-4:]
        if len(body) < 6 or body[0] != _VERSION or sha256(body).digest()[:4] != check or not body[2]:
            raise KeyFileError(_MISTYPED)
        share = cls(body[1], body[2], body[3:5], body[5:])
        # The last letter holds a few bits that decode to nothing, so a slip there needs a look of its own.
        if share.text().replace("-", "") != letters:
            raise KeyFileError(_MISTYPED)
        return share


def split_secret(secret: bytes, threshold: int, count: int) -> list[Share]:
    """`count` shares of a secret, any `threshold` of which restore it."""
    if not 2 <= threshold <= count <= 255:
        raise KeyFileError(f"shares need 2 <= m <= n <= 255, got {threshold} of {count}")
    set_name = secrets.token_bytes(2)
    polynomials = [bytes([byte]) + secrets.token_bytes(threshold - 1) for byte in secret]
    return [Share(threshold, x, set_name, bytes(_value_at(p, x) for p in polynomials)) for x in range(1, count + 1)]


def join_shares(shares: Sequence[Share]) -> bytes:
    """The secret, from at least `threshold` different shares of one set."""
    points = {share.x: share for share in shares}
    if not points:
        raise KeyFileError("no share was found; expected lines as `key backup --shares` prints them")
    first = next(iter(points.values()))
    kinds = {(s.threshold, s.set_name, len(s.values)) for s in shares}
    if len(kinds) != 1:
        raise KeyFileError("these shares come from different backups; use shares of one set")
    if len(points) < first.threshold:
        raise KeyFileError(f"{first.threshold} different shares are needed, got {len(points)}")
    chosen = list(points.values())[: first.threshold]
    secret = bytearray(len(first.values))
    for share in chosen:
        weight = 1
        for other in chosen:
            if other.x != share.x:
                weight = _multiply(weight, _multiply(other.x, _inverse(other.x ^ share.x)))
        for i, value in enumerate(share.values):
            secret[i] ^= _multiply(weight, value)
    return bytes(secret)


def _multiply(a: int, b: int) -> int:
    product = 0
    while b:
        if b & 1:
            product ^= a
        a = (a << 1) ^ (0x11B if a & 0x80 else 0)
        b >>= 1
    return product


def _inverse(a: int) -> int:
    """a^254, since a^255 = 1 for every a but 0."""
    result = 1
    for _ in range(254):
        result = _multiply(result, a)
    return result


def _value_at(coefficients: bytes, x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = _multiply(value, x) ^ coefficient
    return value
