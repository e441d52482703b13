"""Naming a licensee: one null for all, a margin over rivals, two copies at once, and framing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pathmark.errors import VerificationError
from pathmark.stats import Family, LayerMeasurement, PValue, collusion, exact_test, trace

N_LAYERS, N_EXPERTS = 6, 32


def licensees(rng: np.random.Generator, n: int) -> tuple[dict[str, list[list[int]]], np.ndarray]:
    """Random digits, and the groups of one keyed permutation per layer that they stand for."""
    digits = rng.integers(0, N_EXPERTS // 2, (n, N_LAYERS))
    groups = [rng.permutation(N_EXPERTS).reshape(-1, 2) for _ in range(N_LAYERS)]
    paths = {f"L{i}": [g[d].tolist() for g, d in zip(groups, row, strict=True)] for i, row in enumerate(digits)}
    return paths, digits


def measured(rng: np.random.Generator, paths: dict, strengths: dict[str, float]) -> list[LayerMeasurement]:
    layers = []
    for index in range(N_LAYERS):
        diff_E = rng.normal(0, 0.02, N_EXPERTS)
        for name, strength in strengths.items():
            diff_E[paths[name][index]] += strength
        layers.append(LayerMeasurement(20 + index, diff_E, range(N_EXPERTS)))
    return layers


def test_one_leak_is_named() -> None:
    rng = np.random.default_rng(0)
    paths, _ = licensees(rng, 200)
    layers = measured(rng, paths, {"L17": 0.3})
    result = trace(layers, paths)
    assert (result.decision, result.best) == ("licensee", "L17")
    own = exact_test([layer.aim(t) for layer, t in zip(layers, paths["L17"], strict=True)]).p
    assert result.family.ids == 200
    assert result.p == own.charged(np.log10(200))
    assert result.p_against_rival is not None
    assert result.p_against_rival.value < 1e-6
    assert result.p_rival_beside_best is not None
    assert result.p_rival_beside_best.value > 1e-3
    assert result.margin is not None
    assert result.margin > 5


def test_an_unmarked_model_names_nobody() -> None:
    rng = np.random.default_rng(1)
    named = 0
    for _ in range(20):
        paths, _ = licensees(rng, 50)
        named += trace(measured(rng, paths, {}), paths, alpha=0.01).decision != "none"
    assert named <= 2


def test_two_copies_in_one_model_are_both_reported() -> None:
    rng = np.random.default_rng(2)
    paths, _ = licensees(rng, 100)
    result = trace(measured(rng, paths, {"L3": 0.3, "L40": 0.25}), paths)
    assert result.decision == "several"
    assert {name for name, _ in result.ranking[:2]} == {"L3", "L40"}


def test_a_neighbour_in_all_but_one_erased_layer_cannot_be_told_apart() -> None:
    rng = np.random.default_rng(3)
    paths, _ = licensees(rng, 30)
    assert paths["L5"][0] != paths["L9"][0]
    paths["twin"] = [paths["L9"][0], *paths["L5"][1:]]
    layers = measured(rng, paths, {"L5": 0.3})
    layers[0] = LayerMeasurement(20, rng.normal(0, 0.02, N_EXPERTS), range(N_EXPERTS))  # the layer that differs
    result = trace(layers, paths)
    assert result.decision == "ambiguous"
    assert {result.best, result.rival} == {"L5", "twin"}
    assert result.p.value < 1e-6  # marked, no doubt


def test_identical_paths_are_ambiguous() -> None:
    rng = np.random.default_rng(4)
    paths, _ = licensees(rng, 2)
    paths["L1"] = paths["L0"]
    result = trace(measured(rng, paths, {"L0": 0.3}), paths)
    assert result.decision == "ambiguous"
    assert result.p_against_rival == PValue(0.0)


def test_erasures_and_a_family_are_honoured() -> None:
    rng = np.random.default_rng(5)
    paths, _ = licensees(rng, 40)
    layers = measured(rng, paths, {"L8": 0.3})
    matched_E = np.ones(N_EXPERTS, dtype=bool)
    matched_E[paths["L8"][2]] = False
    layers[2] = LayerMeasurement(22, np.where(matched_E, layers[2].diff_E, 0), range(N_EXPERTS), matched_E)
    result = trace(layers, paths, family=Family(suspects=3), alpha=1e-5)
    assert (result.decision, result.best) == ("licensee", "L8")
    # A rival that shares two layers, one erased: three layers tell them apart, and they are charged for.
    assert result.p_against_rival is not None
    assert result.p_against_rival.value == pytest.approx(120 / math.comb(30, 2) ** 3)
    assert result.family.size == 120


def test_a_single_licensee_has_no_rival() -> None:
    rng = np.random.default_rng(6)
    paths, _ = licensees(rng, 1)
    result = trace(measured(rng, paths, {"L0": 0.3}), paths)
    assert (result.decision, result.rival, result.margin) == ("licensee", None, None)


def test_what_two_colluders_can_do() -> None:
    others = np.array([[1, 5, 3, 7], [1, 2, 9, 9], [8, 8, 8, 8]])
    found = collusion([1, 2, 3, 4], [1, 5, 6, 7], others)
    assert (found.shared_layers, found.differing_layers) == (1, 3)
    assert found.framable == (0,)  # 1, 5, 3, 7: each digit is in one of the two copies
    assert found.closest_frame == 4
    assert collusion([1, 2], [1, 2], others[:, :2]).differing_layers == 0


def test_bad_input_is_refused() -> None:
    rng = np.random.default_rng(7)
    paths, _ = licensees(rng, 3)
    layers = measured(rng, paths, {"L0": 0.3})
    with pytest.raises(VerificationError, match="targets for 6 layers, 'L1' has 5"):
        trace(layers, {**paths, "L1": paths["L1"][:5]})
    with pytest.raises(VerificationError, match="at least one licensee"):
        trace(layers, {})
    overlapping = [
        [paths["L0"][0][0], next(e for e in range(32) if e not in paths["L0"][0])],
        *paths["L0"][1:],
    ]
    with pytest.raises(VerificationError, match="share some targets"):
        trace(layers, {"a": paths["L0"], "b": overlapping})
    with pytest.raises(VerificationError, match="paths of one length"):
        collusion([1, 2], [1, 2, 3], np.zeros((1, 2), dtype=int))
