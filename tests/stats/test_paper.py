"""Every formula of the paper against a value computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from pathmark.errors import CapacityError, VerificationError
from pathmark.stats import paper

WATERMARKED = (94.2, 96.3, 95.1, 93.7, 97.2, 96.5)
CLEAN = (7.4, 10.1, 4.9, 2.7, 8.0, 5.5)


def test_capacity_of_the_papers_example() -> None:
    assert paper.capacity_bits(60, 2, 6) == pytest.approx(29.441, abs=1e-3)  # 6 * log2(30)
    assert paper.capacity_bits(60, 2, 6) == pytest.approx(math.log2(30**6))
    assert paper.evidence_bits(60, 2, 6) == pytest.approx(64.74, abs=5e-3)  # 6 * log2(1770)


def test_verification_theorem() -> None:
    # exp(-2 * 100 * (0.8 - 2/60)^2) = exp(-117.56)
    p = paper.paper_bound(0.8, 100, 60, 2)
    assert p.log10 == pytest.approx(-117.5556 / math.log(10), abs=1e-4)
    assert 1e-52 < p.value < 1e-51
    assert paper.paper_bound(0.02, 100, 60, 2).value == 1  # below the null rate there is no evidence
    assert paper.paper_bound(1.0, 10**6, 60, 2).log10 < -800_000  # far below the smallest float


def test_binomial_test_is_exact_and_not_what_table_1_prints() -> None:
    assert paper.binomial_p(100, 100).log10 == pytest.approx(-200)
    assert paper.binomial_p(2, 2, 0.25).value == pytest.approx(1 / 16)
    assert paper.binomial_p(1, 2, 0.25).value == pytest.approx(7 / 16)
    assert paper.binomial_p(0, 7).value == 1
    for hits, n, p0 in ((3, 50, 0.01), (10, 1000, 0.01), (40, 100, 0.3)):
        assert paper.binomial_p(hits, n, p0).value == pytest.approx(scipy_stats.binom.sf(hits - 1, n, p0))


def test_any_hit_null() -> None:
    assert paper.any_hit_null(8, 2) == pytest.approx(13 / 28)  # Mixtral: 1 - 15/28 = 0.46, not 0.25
    assert paper.any_hit_null(60, 2) == pytest.approx(1 - 58 * 57 / (60 * 59))
    assert paper.any_hit_null(8, 2, n_selected=1) == pytest.approx(2 / 8)  # top-1: the paper's k/N
    rng = np.random.default_rng(0)
    draws = np.argsort(rng.random((20_000, 8)), axis=1)[:, :2]
    assert np.isin(draws, [0, 1]).any(axis=1).mean() == pytest.approx(13 / 28, abs=0.015)


def test_stealth_theorem_and_its_constant() -> None:
    assert paper.kl_constant(0.1) == pytest.approx(6)
    assert paper.kl_bound_paper(0.02, 0.1) == pytest.approx(0.004)
    assert paper.kl_bound(0.0004, 0.1) == pytest.approx(0.024)


def test_kl_bound_holds_with_the_mean_square_and_fails_with_the_squared_mean() -> None:
    # Most inputs keep their routing, a few change much: E[X^2] is far above E[X]^2.
    before = np.tile([0.5, 0.3, 0.2], (100, 1))
    after = before.copy()
    after[:5] = [0.2, 0.3, 0.5]
    kl = (before * np.log(before / after)).sum(axis=1).mean()
    change = np.linalg.norm(after - before, axis=1)
    assert kl <= paper.kl_bound((change**2).mean(), 0.2)
    assert kl > paper.kl_bound_paper(change.mean(), 0.2)


def test_detection_sample_complexity() -> None:
    assert paper.detection_samples_paper(0.02, 0.1) == pytest.approx(1497.87, abs=0.01)  # not 1.5e4
    assert paper.detection_samples_paper(0.02, 0.01) == pytest.approx(149.787, abs=0.001)
    assert paper.detection_samples(paper.kl_bound(0.0004, 0.1)) == pytest.approx(1497.87 / 6, abs=0.01)


def test_gradient_balance() -> None:
    # 3e / (sqrt 2 - 0.1 e) = 8.1548 / 1.1424
    assert paper.gradient_balance_alpha(1, 2) == pytest.approx(7.138, abs=1e-3)
    # Not proportional to the temperature: it falls, then rises.
    a = [paper.gradient_balance_alpha(t, 2, leakage=0.01) for t in (0.3, 1.0, 2.0)]
    assert a[0] > a[1] < a[2]
    with pytest.raises(VerificationError, match="no alpha balances"):
        paper.gradient_balance_alpha(0.2, 2)
    with pytest.raises(VerificationError, match="no alpha balances"):
        paper.gradient_balance_alpha(1e-4, 2)


def test_latency_inequality() -> None:
    assert paper.latency_margin(2, 4, 8) == pytest.approx(3.5)  # the paper's set-up: 0.5 * 8 - 0.5
    assert paper.latency_margin(1, 8, 4) == pytest.approx(-0.375)  # 0.5 - 0.875: not detectable


def test_concentration_ratios_of_the_white_box_table() -> None:
    assert paper.concentration_mean(WATERMARKED, CLEAN) == pytest.approx(17.7, abs=0.05)
    assert paper.concentration_pooled(WATERMARKED, CLEAN) == pytest.approx(573.0 / 38.6)  # 14.84
    assert paper.concentration_pooled([95.5], [6.4]) == pytest.approx(14.92, abs=0.005)  # printed averages


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: paper.capacity_bits(4, 5, 1), CapacityError),
        (lambda: paper.paper_bound(1.2, 10, 60, 2), VerificationError),
        (lambda: paper.binomial_p(3, 2), VerificationError),
        (lambda: paper.kl_bound_paper(0.1, 0), VerificationError),
        (lambda: paper.detection_samples(0), VerificationError),
        (lambda: paper.latency_margin(5, 4, 8), VerificationError),
        (lambda: paper.concentration_pooled([1.0], [0.0]), VerificationError),
    ],
)
def test_bad_input_is_refused(call, error) -> None:
    with pytest.raises(error, match="got"):
        call()
