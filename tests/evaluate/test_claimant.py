"""A claimant who chooses everything that can be chosen is believed no more often than the level says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from embed_helpers import key_for

from pathmark.evaluate.claimant import LEVELS, Attempted, Choice, attempt, exceeds, strategies
from pathmark.evaluate.forgery import Victim
from pathmark.keys import commit_key, open_claim, reveal_watermark
from pathmark.models.describe import describe_model
from pathmark.stats import LayerMeasurement, Rate
from pathmark.verdicts.claims import openable

ATTEMPTS = 1_000


def unmarked(facts, codec, seed):
    """A model whose experts a prefix calls very differently: few gain a lot."""
    rng = np.random.default_rng(seed)
    return Victim(
        facts, codec, tuple(LayerMeasurement(n, rng.standard_cauchy(64) / 100, tuple(range(64))) for n in range(8))
    )


@pytest.fixture(scope="module")
def ways():
    facts, codec, _ = describe_model("bundled:tiny")
    victims = [unmarked(facts, codec, seed) for seed in range(6)]
    return strategies(victims[:4], victims[4:], key_for("bundled:tiny", seed=1))


def test_no_strategy_is_believed_more_often_than_its_level(ways):
    assert {"profiles", "probes", "reference", "original", "layers", "width", "pool", "id", "trigger", "date",
            "one of many leaves", "one of two commitments"} < ways.keys()  # fmt: skip
    found = {}
    for name, options in ways.items():
        few = {way: options[way] for way in list(options)[:2]}  # the benchmark tries all of them, 10,000 times
        size = 200 if max(way.draws for way in few.values()) > 100 else 1_000
        found[name] = attempt(name, few, size)
    assert {name: exceeds(each) for name, each in found.items() if exceeds(each)} == {}
    assert found["nothing"].rates[0].value == pytest.approx(LEVELS[0], abs=0.03)  # the test is not idle either
    assert found["profiles"].face.value == 1  # at face value steering works every time ...
    assert found["profiles"].rates[0].hits == 0  # ... and convinces nobody


def test_what_is_not_charged_would_show(ways):
    """The best of many leaves without their charge comes below every level far too often."""
    (best,) = [way for way in ways["one of many leaves"].values() if way.draws == 64]
    free = attempt("uncharged", {"free": Choice(best.layers, draws=64)}, ATTEMPTS)
    assert set(exceeds(free)) >= {0.1, 0.01}
    assert exceeds(Attempted("x", "x", Rate(0, 10), tuple(Rate(10, 10) for _ in LEVELS))) == list(LEVELS)


def test_the_charges_are_the_program_s_own(ways):
    key = key_for("bundled:tiny", seed=1)
    assert openable(open_claim(reveal_watermark(key, 0), commit_key(key))) == 1
    leaves = ways["one of many leaves"].values()
    assert all(way.factor == way.draws for way in leaves)
    (late,) = ways["date"].values()
    read = late.third_party(np.array([-20.0, -300.0]))
    assert read[0] == 0
    assert read[1] == pytest.approx(-300 + late.anchor.charge_bits * math.log10(2))
