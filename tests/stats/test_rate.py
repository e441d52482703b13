from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from pathmark.errors import VerificationError
from pathmark.stats import Rate


def test_prints_its_interval() -> None:
    assert str(Rate(97, 100)) == "97/100 = 97.0 % [91.5, 99.4]"
    assert str(Rate(0, 20)) == "0/20 = 0.0 % [0.0, 16.8]"
    assert str(Rate(20, 20)) == "20/20 = 100.0 % [83.2, 100.0]"


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_interval_agrees_with_an_independent_implementation(case: tuple[int, int]) -> None:
    hits, n = case
    expected = binomtest(hits, n).proportion_ci(0.95, method="exact")
    assert Rate(hits, n).interval() == pytest.approx((expected.low, expected.high), rel=1e-8, abs=1e-12)


def test_interval_of_very_many_trials() -> None:
    expected = binomtest(123_456, 1_000_000).proportion_ci(0.99, method="exact")
    assert Rate(123_456, 1_000_000).interval(0.99) == pytest.approx((expected.low, expected.high), rel=1e-8)


@pytest.mark.parametrize(("hits", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_impossible_rates_are_refused(hits: int, n: int) -> None:
    with pytest.raises(VerificationError, match="expected 0 <= hits <= n"):
        Rate(hits, n)
