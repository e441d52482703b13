from __future__ import annotations

import math

import numpy as np
import pytest

from pathmark.errors import VerificationError
from pathmark.stats import MarkTrial, marks_p


def mark(*, bits: float = 40.0, max_starts: int = 16, trials: int = 50, seen: bool = True) -> MarkTrial:
    return MarkTrial(bits=bits, max_starts=max_starts, trials=trials, seen=seen)


def test_one_mark_seen_at_least_once() -> None:
    assert marks_p([mark()]).value == pytest.approx(16 * 50 * 2.0**-40)
    assert marks_p([mark(trials=1)]).value == pytest.approx(16 * 2.0**-40)  # fifty greedy repeats
    assert marks_p([mark(seen=False)]).value == 1
    assert marks_p([mark(bits=4)]).value == 1  # a bound above one says nothing


def test_distinct_marks_multiply_by_conditioning() -> None:
    assert marks_p([mark(), mark()]).value == pytest.approx((800 * 2.0**-40) ** 2)
    # Three candidates left for the second of two marks out of four.
    few = mark(bits=2, max_starts=1, trials=1)
    assert marks_p([few, few]).value == pytest.approx(1 / 4 * 1 / 3)
    assert marks_p([few] * 5).value == pytest.approx(1 / 24)  # the fourth and fifth are certain


def test_some_marks_missing_are_charged_for_the_choice() -> None:
    q = 800 * 2.0**-40
    assert marks_p([mark(), mark(seen=False), mark()]).value == pytest.approx(3 * q**2)
    assert marks_p([mark(bits=5000, trials=1)] * 3).log10 < -4000


def test_the_bound_holds_in_simulation() -> None:
    # 64 candidates, replies of 4 symbols: how often does a reply hold a mark drawn at random?
    rng = np.random.default_rng(0)
    trials = [MarkTrial(bits=6, max_starts=4, trials=2, seen=True) for _ in range(2)]
    replies = rng.integers(0, 64, (2, 2, 4))  # mark, trial, symbol: fixed before the marks are drawn
    marks = np.argsort(rng.random((40_000, 64)), axis=1)[:, :2]
    seen = np.stack([np.isin(marks[:, j], replies[j]) for j in range(2)], axis=1)
    one_missing = [trials[0], mark(bits=6, max_starts=4, trials=2, seen=False)]
    for share, bound in (
        (seen.all(axis=1).mean(), marks_p(trials)),
        (seen.any(axis=1).mean(), marks_p(one_missing)),
    ):
        assert 0.5 * bound.value < share < bound.value + 5 * math.sqrt(bound.value / len(marks))


def test_bad_trials_are_refused() -> None:
    with pytest.raises(VerificationError, match="at least one mark"):
        marks_p([])
    with pytest.raises(VerificationError, match="trials >= 1"):
        mark(trials=0)
    assert math.isfinite(mark(bits=0).log10_chance(3))
