"""P-values as numbers, Fisher's method, families and the two readers of a verdict."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from pathmark.errors import VerificationError
from pathmark.stats import Family, PValue, bonferroni, fisher, third_party_p


def test_p_values_survive_below_the_smallest_float() -> None:
    tiny = PValue(-742.3)
    assert tiny.value > 0
    assert str(tiny) == "5.0e-743"
    assert str(PValue.of(1.4e-15)) == "1.4e-15"
    assert str(PValue(math.log10(9.99e-8))) == "1.0e-07"
    assert str(PValue.of(0.25)) == "0.25"
    assert PValue(-9) < PValue(-8)
    assert PValue.of_counts(3, 10**400).log10 == pytest.approx(math.log10(3) - 400)


@pytest.mark.parametrize("bad", [0.0, -0.1, 1.1, math.nan])
def test_impossible_p_values_are_refused(bad: float) -> None:
    with pytest.raises(VerificationError):
        PValue.of(bad)


@given(st.lists(st.floats(1e-30, 1), min_size=1, max_size=16))
def test_fisher_agrees_with_scipy(values: list[float]) -> None:
    expected = scipy_stats.combine_pvalues(values, method="fisher").pvalue
    assert fisher([PValue.of(p) for p in values]).value == pytest.approx(expected, rel=1e-8)


def test_fisher_by_hand_and_far_out() -> None:
    # q (1 - ln q) for two: 0.01 * (1 + 4.60517)
    assert fisher([PValue.of(0.1)] * 2).value == pytest.approx(0.01 * (1 + math.log(100)))
    assert fisher([PValue(-17.5)]).log10 == pytest.approx(-17.5)
    assert -1000 < fisher([PValue(-500)] * 2).log10 < -996


def test_a_product_of_p_values_is_not_one_but_fisher_is() -> None:
    draws = np.random.default_rng(0).random((20_000, 3))
    product = (draws.prod(axis=1) <= 0.01).mean()
    combined = np.mean([fisher([PValue.of(p) for p in row]).value <= 0.01 for row in draws[:5000]])
    assert product > 0.1
    assert combined < 0.015


def test_family_states_and_charges_everything_tried() -> None:
    family = Family(keys=2, ids=500, suspects=3)
    assert family.size == 3000
    assert str(family) == "3000 tried: 2 keys x 500 ids x 3 suspects"
    assert str(Family()) == "1 tried"
    assert bonferroni(PValue.of(1e-9), family).value == pytest.approx(3e-6)
    assert bonferroni(PValue.of(0.01), family).value == 1
    with pytest.raises(VerificationError, match="triggers: at least 1"):
        Family(triggers=0)


def test_third_party_takes_face_value_only_of_an_anchored_key() -> None:
    p = PValue(-30.0)
    assert third_party_p(p, anchored=True) == p
    assert third_party_p(p, anchored=False).log10 == pytest.approx(-30 + 80 * math.log10(2))
    assert third_party_p(PValue(-20.0), anchored=False).value == 1
    with pytest.raises(VerificationError, match="smaller"):
        third_party_p(p, anchored=False, grinding_bits=-1)
