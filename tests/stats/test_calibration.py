"""On unmarked data P(p <= a) <= a, whatever the routing; and what grinding does to a face value.

The keys are random, the data are fixed: skewed popularity, tokens of a text that move together, a prefix
that shifts them all (`benchmarks/null_calibration.py`). Keys are independent, so the number of p <= a is at
most Binomial(n, a); a test fails by chance less than once in a million runs.
"""

from __future__ import annotations

import itertools
import math
from types import ModuleType

import numpy as np
import pytest
from scipy.stats import binom

from pathmark.stats import (
    LayerEvidence,
    PValue,
    exact_test,
    third_party_p,
)

LEVELS = (0.5, 0.05, 0.01, 0.001)
N_KEYS = 20_000


def assert_calibrated(log10_p: np.ndarray) -> None:
    for level in LEVELS:
        found = int((log10_p <= math.log10(level)).sum())
        assert found <= binom.ppf(1 - 1e-7, len(log10_p), level), f"P(p <= {level}) = {found / len(log10_p)}"


@pytest.mark.parametrize("erasures", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_one_watermark(null_data: ModuleType, counts: bool, erasures: bool) -> None:
    log10_p = null_data.one_watermark(N_KEYS, counts, erasures)
    assert_calibrated(log10_p)
    assert (log10_p <= math.log10(0.05)).mean() > 0.03  # and not merely by never rejecting


@pytest.mark.parametrize(
    ("counts", "erasures"),
    [
        (True, True),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
    ],
)
def test_three_watermarks(null_data: ModuleType, counts: bool, erasures: bool) -> None:
    log10_p = null_data.three_watermarks(N_KEYS, counts, erasures)
    assert_calibrated(log10_p)
    assert (log10_p <= math.log10(0.05)).mean() > 0.03


def test_the_papers_bound_is_not_calibrated_on_the_same_data(null_data: ModuleType) -> None:
    results = null_data.measure(seed=1, n_keys=N_KEYS)
    assert_calibrated(results["exact"])
    for name in ("paper, top-1 hits", "paper, any hit"):
        assert (results[name] <= -3).mean() > 0.1, f"{name}: promised 0.001"
        assert (results[name] <= -20).mean() > 0.05, f"{name}: promised 1e-20"


def test_grinding_beats_a_face_value_and_not_the_third_party(null_data: ModuleType) -> None:
    # Trigger and model are fixed; the thief hashes a million secrets and keeps the path that fits best.
    n_secrets, n_layers, faces = 10**6, 6, []
    pairs = np.array(list(itertools.combinations(range(32), 2)))
    for model in range(5):
        diffs = null_data.differences(30 + model, n_layers, 32, counts=False)
        rng = np.random.default_rng(model)
        targets = [pairs[rng.integers(0, len(pairs), n_secrets)] for _ in range(n_layers)]
        statistics = sum(diff_E[t_KW].sum(axis=1) for diff_E, t_KW in zip(diffs, targets, strict=True))
        best = int(np.argmax(statistics))
        evidence = [
            LayerEvidence(layer, diffs[layer], range(32), targets[layer][best].tolist()) for layer in range(n_layers)
        ]
        faces.append(exact_test(evidence).p)
    # The best of n honest p-values is about 1/n: it looks like proof to whoever does not ask about n.
    assert min(faces) < PValue.of(1e-6)
    assert all(PValue.of(1e-9) < face < PValue.of(1e-5) for face in faces)
    assert all(third_party_p(face, anchored=False).value == 1 for face in faces)
