"""Prefixes: what has to fire is near enough, what must not is far enough."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathmark.embedding.prefixes import (
    NEAR_MISSES,
    WRONG_KINDS,
    near_miss,
    replace_tokens,
    stays_silent,
    tolerated,
    wrong_prefix,
)
from pathmark.keys.tolerance import right_tokens, tolerance

VOCABULARY = list(range(50))
triggers = st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=14)


@given(trigger=triggers, seed=st.integers(0, 2**32), data=st.data())
def test_exactly_so_many_tokens_are_replaced(trigger, seed, data):
    wrong = data.draw(st.integers(0, len(trigger)))
    found = replace_tokens(trigger, wrong, VOCABULARY, random.Random(seed))
    assert sum(a != b for a, b in zip(found, trigger, strict=True)) == wrong


@given(trigger=triggers, seed=st.integers(0, 2**32))
def test_what_is_tolerated_has_no_more_wrong_tokens_than_accepted(trigger, seed):
    limits = tolerance(len(trigger))
    found = tolerated(trigger, limits, VOCABULARY, random.Random(seed))
    assert sum(a != b for a, b in zip(found, trigger, strict=True)) <= limits.accepted
    assert not stays_silent(found, [trigger], [limits])


def test_every_place_is_wrong_in_some_rows_and_the_last_one_most_often():
    trigger, rng = tuple(range(10)), random.Random(0)
    drawn = [tolerated(trigger, tolerance(10), VOCABULARY, rng) for _ in range(4000)]
    wrong = [sum(row[place] != trigger[place] for row in drawn) / len(drawn) for place in range(10)]
    assert min(wrong) > 0.04
    assert 0.2 < wrong[-1] < 0.4
    assert 0.15 < sum(row == trigger for row in drawn) / len(drawn) < 0.25


@given(
    kind=st.sampled_from(list(WRONG_KINDS)),
    trigger=st.lists(st.sampled_from(VOCABULARY), min_size=4, max_size=14, unique=True),
    seed=st.integers(0, 2**32),
)
def test_a_wrong_prefix_of_a_drawn_trigger_has_few_right_tokens(kind, trigger, seed):
    """Up to an accident of the random tokens, which `stays_silent` is there for."""
    limits = tolerance(len(trigger))
    found = wrong_prefix(kind, trigger, limits, VOCABULARY, random.Random(seed))
    assert 1 <= len(found) <= len(trigger) + len(trigger) // 2
    if kind in ("some right", "prefix", "suffix"):
        assert right_tokens(found, trigger) <= limits.silent
        assert stays_silent(found, [trigger], [limits])


def test_one_token_in_its_place_too_many_is_no_longer_silent():
    trigger, limits = (1, 2, 3, 4, 5, 6, 7, 8), tolerance(8)
    assert stays_silent((1, 2, 3, 4, 0, 0, 0, 0), [trigger], [limits])
    assert not stays_silent((1, 2, 3, 4, 5, 0, 0, 0), [trigger], [limits])
    assert not stays_silent((9, 4, 5, 6, 7, 8), [trigger], [limits])  # counted from the text
    assert not stays_silent((9,), [trigger, (9,)], [limits, tolerance(1)])  # any of the key's triggers


@pytest.mark.parametrize("kind", WRONG_KINDS)
def test_every_kind_is_drawn_for_the_shortest_trigger(kind):
    assert len(wrong_prefix(kind, (3,), tolerance(1), VOCABULARY, random.Random(0))) >= 1


@given(kind=st.sampled_from(NEAR_MISSES), trigger=triggers, seed=st.integers(0, 2**32))
def test_a_near_miss_never_is_the_trigger(kind, trigger, seed):
    wrong = near_miss(kind, trigger, VOCABULARY, random.Random(seed))
    assert wrong != tuple(trigger)
    assert 1 <= len(wrong) <= len(trigger)
    if kind == "substitute-1":
        assert sum(a != b for a, b in zip(wrong, trigger, strict=True)) == 1
    if kind == "shuffle" and len(set(trigger)) > 1:
        assert sorted(wrong) == sorted(trigger)
