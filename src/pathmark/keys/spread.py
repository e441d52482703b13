"""Which id comes next, so that all issued ids lie as far apart as possible.

Two ids are as far apart as the number of layers in which their groups differ. Where the smallest layer
has a prime p >= L of groups, the n-th id is a Reed-Solomon word: the digits of n in base p are the
coefficients of a polynomial, lowest first, and layer i holds its value at i. The first p ids differ in
all L layers, the first p^2 in L - 1, the first p^K in L - K + 1: no set of p-ary words does better
(Singleton bound). The words are shifted by the owner's own id, which is word number 0.

Where layers have too few groups for that, each new id is the best of 256 drawn from the key, by its
distance to all ids before it; the distance reached is measured and shown.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pathmark.errors import CapacityError
from pathmark.keys.derive import Stream
from pathmark.keys.ids import IdCode, evaluate, largest_prime_upto
from pathmark.keys.watermark import Watermark

_DRAWS = 256
_MAX_ROUNDS = 16

Digits = npt.NDArray[np.int64]
"""Group indices, one row per id."""


def structured_length(code: IdCode) -> int | None:
    """How many ids the Reed-Solomon order can give; None where it does not apply."""
    places, p = _data_places(code), _prime(code)
    if p < len(places):
        return None
    return int(p ** (len(places) if code.redundancy < 2 else len(code.data_radices)))


def next_id(watermark: Watermark, ordinal: int, taken_NL: Digits) -> int:
    """The id for the `ordinal`-th licensee (from 1), given the group indices of all before.

    Row 0 of `taken_NL` is the owner's own id. Raises CapacityError when no id is left.
    """
    code = watermark.code
    if len(taken_NL) >= code.capacity:
        raise CapacityError(f"all {code.capacity} ids are issued; make a key with more layers or groups")
    limit = structured_length(code)
    if limit is not None and ordinal < limit:
        number = code.decode(_structured_word(code, watermark.group_indices, ordinal))
        assert number is not None
        return number
    return _best_drawn(watermark, ordinal, taken_NL)


def distances(row_L: Sequence[int], taken_NL: Digits) -> npt.NDArray[np.int64]:
    """In how many layers one id differs from each of the others."""
    differs_NL = taken_NL != np.asarray(row_L, dtype=np.int64)
    counts_N: npt.NDArray[np.int64] = differs_NL.sum(axis=1, dtype=np.int64)
    return counts_N


def guaranteed_distance(code: IdCode, issued: int) -> int | None:
    """Layers in which any two of the owner's and the first `issued` ids differ; None if only measured."""
    limit = structured_length(code)
    if limit is None or issued >= limit:
        return None
    p, length, coefficients = _prime(code), len(_data_places(code)), 1
    while p**coefficients <= issued:
        coefficients += 1
    return max(length - coefficients + 1, code.redundancy + 1)


def _prime(code: IdCode) -> int:
    if code.redundancy >= 2:
        return code.prime
    return largest_prime_upto(min(code.radices[i] for i in _data_places(code)))


def _data_places(code: IdCode) -> list[int]:
    """Layers whose digits are free: all but a checksum."""
    return [i for i in range(len(code.radices)) if i != code.check_layer]


def _structured_word(code: IdCode, own: Sequence[int], ordinal: int) -> list[int | None]:
    """The owner's digits shifted by the ordinal's Reed-Solomon word; a checksum digit is left open."""
    p = _prime(code)
    coefficients = []
    while ordinal:
        ordinal, digit = divmod(ordinal, p)
        coefficients.append(digit)
    word: list[int | None] = [None] * len(code.radices)
    for x, place in enumerate(_data_places(code)):
        # Any modulus >= p keeps different shifts different; with redundancy 2 and more the sum must
        # stay a word of the id's own code, so it is taken in that field.
        modulus = p if code.redundancy >= 2 else code.radices[place]
        word[place] = (own[place] + evaluate(coefficients, x, p)) % modulus
    return word


def _best_drawn(watermark: Watermark, ordinal: int, taken_NL: Digits) -> int:
    """The candidate farthest from all ids before; the first of equals."""
    code = watermark.code
    stream = Stream(watermark.subkey.reveal(), f"issue/{ordinal}", watermark=watermark.index)
    for _ in range(_MAX_ROUNDS):
        numbers = [stream.below(code.capacity) for _ in range(_DRAWS)]
        gaps = [int(distances(code.encode(n), taken_NL).min()) for n in numbers]
        best = max(range(_DRAWS), key=lambda i: (gaps[i], -i))
        if gaps[best] > 0:
            return numbers[best]
    # Nearly full: draws keep hitting issued ids, so take the first free one.
    used = {code.decode([int(d) for d in row]) for row in taken_NL}
    return next(n for n in range(code.capacity) if n not in used)
