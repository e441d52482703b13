"""Shamir's shares: any m restore, m - 1 say nothing, slips of the pen are noticed."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathmark.errors import KeyFileError
from pathmark.keys.shares import Share, join_shares, split_secret

SECRET = bytes(range(100, 132))


@pytest.mark.parametrize(("m", "n"), [(2, 2), (2, 5), (3, 5), (5, 5)])
def test_any_m_of_n_restore(m: int, n: int) -> None:
    shares = [Share.parse(s.text()) for s in split_secret(SECRET, m, n)]
    for chosen in combinations(shares, m):
        assert join_shares(chosen) == SECRET
    assert join_shares(shares) == SECRET
    for chosen in combinations(shares, m - 1):
        with pytest.raises(KeyFileError, match=f"{m} different shares are needed"):
            join_shares(chosen)
    with pytest.raises(KeyFileError, match="needed"):
        join_shares([shares[0]] * m)


def test_fewer_shares_say_nothing() -> None:
    """m - 1 shares of two different secrets have the same distribution: every byte is uniform."""
    for secret in (b"\x00", b"\xff"):
        seen = Counter(split_secret(secret, 2, 2)[0].values[0] for _ in range(25_600))
        assert len(seen) == 256
        assert sum((c - 100) ** 2 / 100 for c in seen.values()) < 255 + 5 * (2 * 255) ** 0.5


@given(st.binary(min_size=1, max_size=40), st.integers(2, 6), st.integers(0, 4))
def test_round_trip(secret: bytes, m: int, more: int) -> None:
    shares = split_secret(secret, m, m + more)
    assert join_shares(shares[more:]) == secret


def test_every_mistyped_letter_is_noticed() -> None:
    text = split_secret(SECRET, 2, 3)[0].text()
    assert Share.parse(text.lower().replace("-", "  ")).x == 1
    for place, letter in enumerate(text):
        for other in set("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567") - {letter} if letter != "-" else ():
            with pytest.raises(KeyFileError, match="mistyped"):
                Share.parse(text[:place] + other + text[place + 1 :])
    for junk in ("", "A", "hello world", text[:-8], "é"):
        with pytest.raises(KeyFileError):
            Share.parse(junk)


def test_shares_of_different_sets_do_not_mix() -> None:
    first, second = split_secret(SECRET, 2, 2), split_secret(SECRET, 3, 3)
    with pytest.raises(KeyFileError, match="different backups"):
        join_shares([first[0], second[1]])
    with pytest.raises(KeyFileError, match="no share was found"):
        join_shares([])


@pytest.mark.parametrize(("m", "n"), [(1, 3), (4, 3), (2, 256)])
def test_impossible_splits(m: int, n: int) -> None:
    with pytest.raises(KeyFileError, match="2 <= m"):
        split_secret(SECRET, m, n)


def test_hidden_in_repr() -> None:
    share = split_secret(SECRET, 2, 2)[0]
    assert share.values.hex() not in repr(share)
    assert share.text() not in repr(share)
