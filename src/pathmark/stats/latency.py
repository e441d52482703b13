"""Is one kind of request slower than its twin? An exact paired test on medians, and what it could have seen.

Pairs are compared by the logarithm of their ratio, so that an effect is a percentage and a slow hour counts no
more than a fast one. The statistic is the (lower) median of these, fixed beforehand. Under the null hypothesis
the trigger changes no time, so which of the two requests came out slower was decided by the coin that ordered
them: every pair's sign is a fair coin of *ours*. That holds however the noise looks, with heavy tails, drift
and memory, because the coin knows nothing of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pathmark.errors import VerificationError
from pathmark.stats.pvalue import PValue

Array = NDArray[np.float64]
SIMULATIONS = 1000


@dataclass(frozen=True)
class LatencyEffect:
    """How much slower triggered requests are, as a share: 0.08 is 8 %."""

    value: float
    low: float
    high: float
    confidence: float
    n: int
    """Pairs behind it."""

    def __str__(self) -> str:
        return f"{100 * self.value:+.1f} % [{100 * self.low:+.1f}, {100 * self.high:+.1f}] (n = {self.n})"


def log_ratios(triggered: Sequence[float], clean: Sequence[float]) -> Array:
    """log(triggered / clean) of each pair of seconds."""
    if len(triggered) != len(clean) or not len(clean):
        raise VerificationError(f"expected pairs of times, got {len(triggered)} triggered and {len(clean)} clean")
    times = np.asarray([triggered, clean], dtype=np.float64)
    if not np.isfinite(times).all() or times.min() <= 0:
        raise VerificationError("expected positive finite seconds; a clock that stands still measures nothing")
    ratios: Array = np.log(times[0] / times[1])
    return ratios


def sign_flip_test(ratios: Sequence[float] | Array) -> PValue:
    """P(lower median >= the observed one) over all 2^n sign patterns, exactly and for any n.

    No enumeration is needed. Let t be the observed lower median and `need` = floor(n/2) + 1 the number of values
    that must reach t. For t > 0 a pair reaches t only if |d| >= t and its coin says so; for t <= 0 pairs with
    |d| <= -t reach it whatever their coin says. Either way the count is a constant plus a binomial of fair coins.
    Ties of |d|, from a coarse clock, are broken by the pairs' numbers, of which the coins know nothing.
    """
    values = _signed_ranks(_checked(ratios))
    size = np.abs(values)
    need = len(values) // 2 + 1
    observed = lower_median(values)
    certain = 0 if observed > 0 else int((size <= -observed).sum())
    coins = int((size >= observed).sum()) if observed > 0 else len(values) - certain
    return PValue.of_counts(_heads(coins, need - certain), 1 << coins)


def two_sided(ratios: Sequence[float] | Array) -> PValue:
    """Either direction: twice the smaller of both p-values."""
    values = _checked(ratios)
    return min(sign_flip_test(values), sign_flip_test(-values)).charged(math.log10(2))


def lower_median(values: Array) -> float:
    """The middle value, the lower one of two: then the exact null is a binomial tail for even n as well."""
    return float(np.sort(values)[(len(values) - 1) // 2])


def smallest_p(pairs: int) -> PValue:
    """The floor of `sign_flip_test`: every pair is slower, and the coins of the upper half count."""
    return PValue.of_counts(1, 1 << (pairs // 2 + 1))


def fewest_pairs(significance: float) -> int:
    """Pairs below which no result can be significant."""
    if not 0 < significance < 0.5:
        raise VerificationError(f"expected a significance between 0 and 0.5, got {significance}; 0.01 is usual")
    pairs = 1
    while smallest_p(pairs).value > significance:
        pairs += 1
    return pairs


def median_effect(ratios: Sequence[float] | Array, confidence: float = 0.95) -> LatencyEffect:
    """Median slowdown with the order-statistic interval.

    The interval covers the median with at least `confidence` for independent pairs of any distribution; where pairs
    remember each other it is too narrow, while the test stays exact.
    """
    values = np.sort(_checked(ratios))
    n = len(values)
    if not 0 < confidence < 1:
        raise VerificationError(f"confidence lies between 0 and 1, got {confidence}; 0.95 is usual")
    rank = 0
    while 2 * _lower_tail(n, rank) <= 1 - confidence:
        rank += 1
    if rank == 0:
        raise VerificationError(f"{n} pairs give no interval at {confidence:g}; measure more")
    low, high = values[rank - 1], values[n - rank]
    return LatencyEffect(math.expm1(float(np.median(values))), math.expm1(low), math.expm1(high), confidence, n)


def detectable_effect(
    noise: Sequence[float] | Array, pairs: int, *, significance: float = 0.01, power: float = 0.8, seed: int = 0
) -> float:
    """The smallest slowdown that `pairs` pairs with this noise show with probability `power`, as a share.

    `noise` are log ratios of pairs between which nothing differs. They are centred, given random signs and drawn
    again with replacement; the test is run on draws shifted by an effect, which is bisected. An estimate: its own
    error is that of a few dozen calibration pairs, and pairs that remember each other make it optimistic.
    """
    values = _checked(noise)
    if pairs < fewest_pairs(significance):
        raise VerificationError(
            f"{pairs} pairs cannot reach p = {significance:g}; expected at least {fewest_pairs(significance)}"
        )
    if not 0 < power < 1:
        raise VerificationError(f"power lies between 0 and 1, got {power}; 0.8 is usual")
    size = np.abs(values - np.median(values))
    if size.max() == 0:
        return 0.0
    rng = np.random.default_rng(seed)
    draws_SN = rng.choice(size, (SIMULATIONS, pairs)) * rng.choice([-1.0, 1.0], (SIMULATIONS, pairs))
    draws_SN += 1e-6 * size.max() * rng.random(draws_SN.shape)  # drawn twice is no tie
    most = _most_coins(pairs, significance)

    def seen(shift: float) -> float:
        shifted_SN = draws_SN + shift
        median_S = np.partition(shifted_SN, (pairs - 1) // 2, axis=1)[:, (pairs - 1) // 2]
        coins_S = (np.abs(shifted_SN) >= median_S[:, None]).sum(axis=1)
        return float(np.mean((median_S > 0) & (coins_S <= most)))

    low, high = 0.0, float(2 * size.max())  # there every draw is positive and above every negative one
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if seen(middle) >= power else (middle, high)
    return math.expm1(high)


def pairs_needed(detectable: float, pairs: int, effect: float) -> int:
    """About how many pairs bring the detectable effect down to `effect`: noise of a median falls with sqrt(n)."""
    if effect <= 0:
        raise VerificationError(f"expected a positive effect, got {effect}")
    return math.ceil(pairs * max(1.0, math.log1p(detectable) / math.log1p(effect)) ** 2)


def _checked(ratios: Sequence[float] | Array) -> Array:
    values = np.asarray(ratios, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise VerificationError(f"expected finite log ratios, one per pair, got shape {values.shape}")
    return values


def _signed_ranks(values: Array) -> Array:
    """Each value as its rank by size, with its sign; zero stays zero. The median is the same pair's as before."""
    ranks = np.empty_like(values)
    ranks[np.argsort(np.abs(values), kind="stable")] = np.arange(1, len(values) + 1)
    signed: Array = np.sign(values) * ranks
    return signed


def _heads(coins: int, at_least: int) -> int:
    """How many of the 2^coins patterns have at least so many heads."""
    if at_least <= 0:
        return 1 << coins
    term, total = math.comb(coins, at_least), 0
    for heads in range(at_least, coins + 1):
        total += term
        term = term * (coins - heads) // (heads + 1)
    return total


def _lower_tail(n: int, at_most: int) -> float:
    """P(Binomial(n, 1/2) <= at_most); exact counts, one rounding."""
    return ((1 << n) - _heads(n, at_most + 1)) / (1 << n)


def _most_coins(pairs: int, significance: float) -> int:
    """The largest number of coins in play at which a positive median is still significant."""
    need = pairs // 2 + 1
    coins = need
    while coins < pairs and PValue.of_counts(_heads(coins + 1, need), 1 << (coins + 1)).value <= significance:
        coins += 1
    return coins
