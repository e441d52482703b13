"""The exact test against brute force over all paths, in rational arithmetic."""

from __future__ import annotations

import itertools
import math
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pathmark.errors import VerificationError
from pathmark.stats import (
    LayerEvidence,
    NullDistribution,
    PValue,
    exact_test,
    exact_test_many,
    fisher,
    null_distribution,
)
from pathmark.stats.grid import convolve, programmed_counts, subset_deficits


def brute_force(layers: list[LayerEvidence]) -> Fraction:
    """Share of all paths that do at least as well, path by path, without rounding."""
    observed = sum(Fraction(float(layer.diff_E[e])) for layer in layers for e in layer.live_targets)
    sums = [Fraction(0)]
    for layer in layers:
        subsets = itertools.combinations(layer.live_pool, len(layer.live_targets))
        parts = [sum((Fraction(float(layer.diff_E[e])) for e in subset), Fraction(0)) for subset in subsets]
        sums = [total + part for total in sums for part in parts]
    return Fraction(sum(total >= observed for total in sums), len(sums))


@st.composite
def small_cases(draw: st.DrawFn) -> list[LayerEvidence]:
    """Up to three layers with pools, erasures, ties and either masses or counts."""
    counts = draw(st.booleans())
    # Six decimals: distinct sums are never nearer to each other than the tie tolerance.
    number = st.integers(-30, 30) if counts else st.integers(-(10**6), 10**6).map(lambda i: i / 10**6)
    layers = []
    for index in range(draw(st.integers(1, 3))):
        n_experts = draw(st.integers(2, 8))
        diff_E = np.array(draw(st.lists(number, min_size=n_experts, max_size=n_experts)))
        pool = draw(st.lists(st.integers(0, n_experts - 1), min_size=1, max_size=n_experts, unique=True))
        targets = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=min(3, len(pool)), unique=True))
        matched_E = np.array(draw(st.lists(st.booleans(), min_size=n_experts, max_size=n_experts)))
        layers.append(LayerEvidence(index, diff_E, pool, targets, matched_E))
    return layers


@given(small_cases())
@settings(deadline=None, max_examples=300)
def test_p_equals_brute_force_on_small_cases(layers: list[LayerEvidence]) -> None:
    truth = brute_force(layers)
    result = exact_test(layers)
    assert float(truth) <= result.p_value <= 1.01 * float(truth)
    assert result.floor.value == pytest.approx(1 / result.n_paths)


@given(small_cases())
@settings(deadline=None, max_examples=200)
def test_the_grid_brackets_brute_force(layers: list[LayerEvidence]) -> None:
    truth = brute_force(layers)
    null = null_distribution(layers)
    tail = null.tail(exact_test(layers).statistic, enumerate_paths=False)
    assert tail.lower.value * (1 - 1e-9) <= float(truth) <= tail.p.value * (1 + 1e-14)
    if all(np.asarray(layer.diff_E).dtype.kind == "i" for layer in layers):
        assert tail.p.value == pytest.approx(float(truth), rel=1e-12)  # counts: exact on the grid too


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_grid_is_within_one_percent_where_many_paths_compete(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    values = [(rng.dirichlet(np.full(12, 0.4)) - 1 / 12, width) for _ in range(3)]
    null = NullDistribution(values)
    totals = np.zeros(1)
    for values_N, k in values:
        subsets = np.array(list(itertools.combinations(values_N, k))).sum(axis=1)
        totals = np.add.outer(totals, subsets).ravel()
    for quantile in (0.5, 0.9, 0.99, 0.999):
        statistic = float(np.quantile(totals, quantile))
        truth = (totals >= statistic).mean()
        for p in (
            null.tail(statistic, enumerate_paths=False).p.value,
            10 ** null.log10_p(np.array([statistic]), size=2**15)[0],
        ):
            assert truth <= p <= 1.01 * truth
        assert null.tail(statistic).p.value == pytest.approx(truth, rel=1e-9)


def test_a_far_tail_is_right_to_within_one_percent() -> None:
    # Twelve equal layers of 0/1 values: T is a sum of Bernoulli(1/20), so the tail is a binomial one.
    from scipy.stats import binom

    null = NullDistribution([(np.eye(20)[0], 1)] * 40)
    for hits in (1, 10, 25, 39, 40):
        tail = null.tail(hits, enumerate_paths=False)
        assert tail.p.value == pytest.approx(binom.sf(hits - 1, 40, 1 / 20), rel=1e-6)
    assert null.tail(40).p.log10 == pytest.approx(-40 * math.log10(20))
    # The same with a real-valued copy, on the grid, down to 1e-49.
    jittered = NullDistribution([(np.eye(20)[0] * 0.3, 1)] * 40)
    for hits in (10, 25, 39):
        tail = jittered.tail(hits * 0.3, enumerate_paths=False)
        assert tail.p.value == pytest.approx(binom.sf(hits - 1, 40, 1 / 20), rel=1e-2)


def test_floor_is_reached_by_the_best_path_and_by_no_other() -> None:
    rng = np.random.default_rng(1)
    layers = []
    for layer in range(6):
        diff_E = rng.normal(size=60)
        layers.append(LayerEvidence(layer, diff_E, range(60), np.argsort(-diff_E)[:2].tolist()))
    result = exact_test(layers)
    assert result.n_paths == 1770**6
    assert result.paths_reaching == 1
    assert result.p == result.floor
    assert -math.log2(result.p_value) == pytest.approx(64.7, abs=0.05)
    second = [layers[0], *layers[1:]]
    second[0] = LayerEvidence(0, layers[0].diff_E, range(60), np.argsort(-layers[0].diff_E)[1:3].tolist())
    assert exact_test(second).p > result.floor


def test_ties_count_against_the_mark() -> None:
    flat = [LayerEvidence(0, np.zeros(8), range(8), [1, 2]), LayerEvidence(1, np.full(8, 0.1), range(8), [3])]
    assert exact_test(flat).p_value == 1
    # One expert stands out, all others tie: any pair with it does as well.
    diff_E = np.array([0.7, 0.1, 0.1, 0.1])
    assert exact_test([LayerEvidence(0, diff_E, range(4), [0, 3])]).p_value == pytest.approx(3 / 6)
    # 0.1 + 0.2 and 0.3 tie although their floats differ.
    layers = [
        LayerEvidence(0, np.array([0.1, 0.3]), range(2), [0]),
        LayerEvidence(1, np.array([0.2, 0.0]), range(2), [0]),
    ]
    for enumerate_paths in (True, False):
        tail = null_distribution(layers).tail(0.3, enumerate_paths=enumerate_paths)
        assert tail.p.value == pytest.approx(3 / 4)


def test_only_the_pool_matters() -> None:
    diff_E = np.array([9.0, 0.5, 0.1, 0.0, -3.0])
    result = exact_test([LayerEvidence(0, diff_E, [1, 2, 3], [1])])
    assert result.p_value == pytest.approx(1 / 3)


def test_an_erased_layer_adds_nothing_and_raises_the_floor() -> None:
    rng = np.random.default_rng(2)
    diff_E = rng.normal(size=10)
    best = np.argsort(-diff_E)[:2].tolist()
    whole = LayerEvidence(4, diff_E, range(10), best)
    lost_targets = LayerEvidence(5, diff_E, range(10), best, ~np.isin(np.arange(10), best))
    alone, with_erasure = exact_test([whole]), exact_test([whole, lost_targets])
    assert with_erasure.erased_layers == (5,)
    assert with_erasure.p == alone.p
    assert with_erasure.floor == alone.floor == PValue.of_counts(1, 45)
    # One of two targets lost: the other is one of the nine that are left.
    half = exact_test([LayerEvidence(5, diff_E, range(10), best, np.arange(10) != best[1])])
    assert half.p_value == pytest.approx(1 / 9)
    assert "erased" in str(with_erasure)
    nothing = exact_test([lost_targets])
    assert nothing.p_value == 1
    assert nothing.n_paths == 1


def test_several_watermarks_condition_on_the_earlier_ones() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=8), rng.normal(size=8)
    first = [LayerEvidence(7, a, range(8), [0, 1])]
    second = [LayerEvidence(7, b, range(8), [2, 3]), LayerEvidence(9, a, range(8), [0, 1])]
    combined = exact_test_many([first, second])
    left = [LayerEvidence(7, b, range(2, 8), [2, 3]), second[1]]
    assert combined.results[0].p == exact_test(first).p
    assert combined.results[1].p == exact_test(left).p
    assert combined.results[1].n_paths == 15 * 28
    assert combined.p == fisher([result.p for result in combined.results])
    with pytest.raises(VerificationError, match="shares targets"):
        exact_test_many([first, [LayerEvidence(7, b, range(8), [1, 2])]])
    with pytest.raises(VerificationError, match="overlaps an earlier one"):
        exact_test_many([first, [LayerEvidence(7, b, range(1, 8), [2, 3])]])
    blocks = exact_test_many([[LayerEvidence(7, a, range(4), [0, 1])], [LayerEvidence(7, b, range(4, 8), [4, 5])]])
    assert [result.n_paths for result in blocks.results] == [6, 6]


def test_shared_tables_and_single_tails_agree() -> None:
    rng = np.random.default_rng(4)
    null = NullDistribution([(rng.normal(size=24), 2) for _ in range(5)])
    statistics = np.linspace(-5, null.maximum, 60)
    shared = null.log10_p(statistics)
    for statistic, log10_p in zip(statistics, shared, strict=True):
        tail = null.tail(float(statistic))
        assert tail.lower.log10 - 1e-12 <= log10_p <= tail.p.log10 + math.log10(1.03)
    assert (np.diff(shared) <= 0).all()


@given(st.integers(1, 400), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_convolution_is_the_direct_one(n_cells: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a_C, b_C = rng.random(n_cells) * (rng.random(n_cells) < 0.5), 10.0 ** rng.uniform(-200, 0, n_cells)
    # A relative tolerance only: the smallest cells are as right as the largest.
    np.testing.assert_allclose(convolve(a_C, b_C), np.convolve(a_C, b_C)[:n_cells], rtol=1e-12, atol=0)


def test_dynamic_programme_counts_every_subset_once() -> None:
    values_N = np.sort(np.random.default_rng(5).integers(-9, 9, 14))[::-1].astype(float)
    for k in (1, 2, 5, 13):
        deficits = subset_deficits(values_N, k)
        n_cells = int(deficits.max()) + 1
        counted = programmed_counts(values_N, k, 1.0, n_cells, 0.0, refine=1)
        assert counted.sum() == math.comb(14, k)
        assert np.array_equal(counted, np.bincount(deficits.astype(int), minlength=n_cells))


def test_wide_paths_match_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    layers = [(rng.normal(size=16), 5) for _ in range(2)]
    truth = NullDistribution(layers)
    statistics = [float(q * truth.maximum) for q in (0.2, 0.5, 0.8)]
    exact = [truth.tail(statistic) for statistic in statistics]
    assert {tail.method for tail in exact} == {"enumerated"}
    monkeypatch.setattr("pathmark.stats.null.ENUMERABLE", 0)  # forces the dynamic programme
    programmed = NullDistribution(layers)
    for statistic, expected in zip(statistics, exact, strict=True):
        tail = programmed.tail(statistic)
        assert tail.method == "grid"
        assert tail.lower <= expected.p <= tail.p
        assert tail.p.value <= 1.01 * expected.p.value


def test_e128_k2_12_layers_in_under_a_second() -> None:
    rng = np.random.default_rng(7)
    diffs = [rng.dirichlet(np.full(128, 0.3)) - rng.dirichlet(np.full(128, 0.3)) for _ in range(12)]
    null = NullDistribution([(diff_E, 2) for diff_E in diffs])
    started = time.process_time()
    tail = null.tail(0.6 * null.maximum)
    assert time.process_time() - started < 1
    assert tail.p.value < 1e-12
    assert tail.p.log10 - tail.lower.log10 < math.log10(1.02)


def test_huge_path_spaces_neither_overflow_nor_underflow() -> None:
    rng = np.random.default_rng(8)
    null = NullDistribution([(rng.normal(size=256), 8) for _ in range(30)])
    assert null.n_paths > 10**400
    assert null.tail(null.maximum).p == null.floor
    # A grid as coarse as this bounds the far tail only roughly, and says so.
    log10_p = null.log10_p(np.array([0.0, 0.5 * null.maximum, null.maximum]), size=256)
    assert 0 >= log10_p[0] > log10_p[1] > log10_p[2] >= null.floor.log10
    assert log10_p[0] > -2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerEvidence(3, np.array([1.0, np.nan]), [0, 1], [0]), "layer 3: diff_E holds nan"),
        (lambda: LayerEvidence(3, np.zeros((2, 2)), [0], [0]), "vector of numbers"),
        (lambda: LayerEvidence(3, np.zeros(4), [0, 4], [0]), "distinct experts below 4"),
        (lambda: LayerEvidence(3, np.zeros(4), [0, 1], [2]), "distinct experts of the pool"),
        (lambda: LayerEvidence(3, np.zeros(4), [0, 1], []), "at least one"),
        (lambda: LayerEvidence(3, np.zeros(4), [0, 1], [0], np.ones(3, dtype=bool)), "boolean per expert"),
        (lambda: exact_test([]), "expected distinct layers"),
        (lambda: exact_test_many([]), "at least one watermark"),
        (lambda: NullDistribution([(np.arange(3.0), 4)]), "expected 0 <= width <= 3"),
        (lambda: NullDistribution([(np.arange(3.0), 1)]).tail(5.0), "exceeds what any path can reach"),
        (lambda: NullDistribution([(np.arange(3.0), 1)]).tail(math.nan), "expected finite"),
    ],
)
def test_bad_evidence_is_refused(make, message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        make()
