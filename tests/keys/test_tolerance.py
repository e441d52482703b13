"""What a trigger tolerates, and what that leaves secret."""

from __future__ import annotations

from itertools import product
from math import inf, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathmark.keys.tolerance import MIN_SECRET_BITS, right_tokens, secret_bits, tolerance


@pytest.mark.parametrize(("tokens", "accepted", "silent"), [(1, 0, 0), (4, 1, 2), (8, 2, 4), (10, 2, 5), (12, 3, 6)])
def test_a_quarter_may_be_wrong_and_half_is_not_enough(tokens, accepted, silent):
    found = tolerance(tokens)
    assert (found.accepted, found.silent) == (accepted, silent)


@given(st.integers(1, 64))
def test_what_fires_and_what_is_silent_never_meet(tokens):
    found = tolerance(tokens)
    assert found.silent < tokens - found.accepted


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=5), data=st.data())
def test_secret_bits_count_every_guess(counts, data):
    """Against a count of all guesses that are right in more than `silent` places."""
    silent = data.draw(st.integers(0, len(counts)))
    guesses = list(product(*(range(count) for count in counts)))
    fire = sum(sum(place == 0 for place in guess) > silent for guess in guesses)
    expected = log2(len(guesses) / fire) if fire else inf
    assert secret_bits(counts, silent) == pytest.approx(expected)


def test_a_large_vocabulary_keeps_a_trigger_of_eight_secret():
    """C(8, 5) / V^5 at V = 30,000, and nothing is lost to rounding where a chance is 1e-40."""
    bits = secret_bits([30_000] * 8, tolerance(8).silent)
    assert bits == pytest.approx(5 * log2(30_000) - log2(56), abs=0.01)
    assert bits > MIN_SECRET_BITS
    assert secret_bits([2**20] * 16, 8) == pytest.approx(9 * 20 - log2(11440), abs=0.01)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_right_tokens_are_counted_from_either_end(trigger):
    assert right_tokens(trigger, trigger) == len(trigger)
    assert right_tokens(trigger[:-1], trigger) >= len(trigger) - 1
    assert right_tokens(trigger[1:], trigger) >= len(trigger) - 1
