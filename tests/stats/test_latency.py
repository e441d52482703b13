"""The paired test on medians: exact against enumeration, valid under ugly noise, and able to see an effect."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathmark.errors import VerificationError
from pathmark.stats import (
    detectable_effect,
    fewest_pairs,
    log_ratios,
    median_effect,
    pairs_needed,
    sign_flip_test,
    two_sided,
)
from pathmark.stats.latency import lower_median, smallest_p


def enumerated(values):
    """Share of all sign patterns whose lower median is at least the observed one."""
    size, observed = np.abs(values), lower_median(values)
    patterns = itertools.product((-1, 1), repeat=len(values))
    medians = [lower_median(np.array(signs) * size) for signs in patterns]
    return float(np.mean([m >= observed for m in medians]))


@pytest.mark.parametrize("n", [1, 2, 5, 8, 11])
def test_the_closed_form_is_the_enumeration(n):
    rng = np.random.default_rng(n)
    for shift in (-1.0, 0.0, 0.4, 3.0):
        values = rng.normal(shift, 1, n)
        assert sign_flip_test(values).value == pytest.approx(enumerated(values), rel=1e-12)


def test_a_hand_computed_value():
    # lower median 2 needs three values of at least 2; four coins can give it: C(4,3) + C(4,4) of 16
    assert sign_flip_test([1.0, 2.0, 3.0, -4.0, 5.0]).value == pytest.approx(5 / 16)


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_ties_keep_it_valid(values):
    """Given the sizes, the p-values of all sign patterns are never too small too often."""
    size = np.abs(np.array(values, dtype=float))
    ps = [sign_flip_test(np.array(signs) * size).value for signs in itertools.product((-1, 1), repeat=len(size))]
    for level in set(ps):
        assert np.mean([p <= level for p in ps]) <= level + 1e-12


def test_a_coarse_clock_does_not_hide_a_constant_effect():
    assert sign_flip_test([0.08] * 20) == smallest_p(20)


def randomised_pairs(first, second, rng):
    """Log ratios of requests whose order inside a pair was a coin; nobody changed a time."""
    coin = rng.random(len(first)) < 0.5
    return log_ratios(np.where(coin, first, second), np.where(coin, second, first))


def noise(kind, n, rng):
    """Times of 2n requests in a row without any effect."""
    steps = np.arange(2 * n)
    if kind == "heavy tails":
        return 0.1 + 0.01 * np.abs(rng.standard_cauchy(2 * n))
    if kind == "drift":  # warms up: in every pair the first is slower
        return 0.1 + 0.2 * np.exp(-steps / n) + 0.001 * rng.random(2 * n)
    if kind == "memory":
        walk = np.cumsum(rng.normal(0, 0.05, 2 * n))
        return np.exp(walk)
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["heavy tails", "drift", "memory"])
def test_false_alarms_stay_below_the_level(kind):
    rng = np.random.default_rng(7)
    runs, level = 2000, 0.05
    times = [noise(kind, 25, rng) for _ in range(runs)]
    alarms = sum(sign_flip_test(randomised_pairs(t[0::2], t[1::2], rng)).value <= level for t in times)
    # three standard errors above the level; below it the test is only conservative
    assert alarms / runs <= level + 3 * math.sqrt(level * (1 - level) / runs)
    assert alarms / runs >= 0.005


def test_the_coin_is_what_makes_it_valid():
    """Without the coin a drift alone is significant: the test above could fail."""
    rng = np.random.default_rng(7)
    times = noise("drift", 25, rng)
    assert sign_flip_test(log_ratios(times[0::2], times[1::2])).value < 1e-3


def test_the_interval_covers_and_the_estimate_is_the_median():
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(500):
        effect = median_effect(math.log(1.08) + 0.1 * rng.standard_t(2, 40))
        covered += effect.low <= 0.08 <= effect.high
    assert covered >= 0.95 * 500 - 3 * math.sqrt(500 * 0.95 * 0.05)
    assert median_effect(np.log([1.1] * 9)).value == pytest.approx(0.1)
    assert str(median_effect(np.log([1.1] * 9))) == "+10.0 % [+10.0, +10.0] (n = 9)"


def test_the_interval_is_the_order_statistics_of_the_textbook():
    # n = 10 at 95 %: the 2nd smallest and the 2nd largest (coverage 97.9 %)
    effect = median_effect(np.log(1 + np.arange(1, 11) / 100))
    assert (effect.low, effect.high) == pytest.approx((0.02, 0.09))
    with pytest.raises(VerificationError, match="5 pairs give no interval"):
        median_effect([0.1] * 5)


@pytest.mark.parametrize("pairs", [40, 101])
def test_the_detectable_effect_is_detected_as_often_as_it_says(pairs):
    rng = np.random.default_rng(5)
    effect = detectable_effect(0.1 * rng.standard_t(3, 5000), pairs, significance=0.01, power=0.8)
    seen = [sign_flip_test(math.log1p(effect) + 0.1 * rng.standard_t(3, pairs)).value <= 0.01 for _ in range(600)]
    assert 0.7 < np.mean(seen) < 0.9


def test_the_detectable_effect_falls_with_the_square_root_of_pairs():
    spread = 0.05 * np.random.default_rng(1).normal(size=300)
    few, many = (detectable_effect(spread, n) for n in (50, 200))
    assert 1.7 < few / many < 2.4
    assert pairs_needed(few, 50, many) == pytest.approx(200, rel=0.4)
    assert pairs_needed(0.01, 50, 0.08) == 50
    assert detectable_effect([0.0] * 5, 50) == 0


def test_few_pairs_prove_nothing():
    assert fewest_pairs(0.01) == 12
    assert smallest_p(12).value <= 0.01 < smallest_p(11).value
    with pytest.raises(VerificationError, match="expected at least 12"):
        detectable_effect([0.1, -0.1], 11)


def test_both_directions():
    slower = np.random.default_rng(0).normal(1, 0.1, 20)
    assert two_sided(slower) == two_sided(-slower)
    assert two_sided(slower).value == pytest.approx(2 * min(sign_flip_test(slower), sign_flip_test(-slower)).value)


@pytest.mark.parametrize(("triggered", "clean"), [([1.0], [0.0]), ([1.0, 2.0], [1.0]), ([math.nan], [1.0]), ([], [])])
def test_times_that_are_none(triggered, clean):
    with pytest.raises(VerificationError, match="expected"):
        log_ratios(triggered, clean)
