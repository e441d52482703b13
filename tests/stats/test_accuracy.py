from __future__ import annotations

import numpy as np
import pytest

from pathmark.errors import VerificationError
from pathmark.stats import (
    Rate,
    accuracy,
    hits_from_probs,
    hits_from_selection,
    layer_accuracy,
    mass_difference,
    probe_accuracy,
    selection_difference,
    wsr,
)

# One probe, three tokens, four experts.
PROBS_BTE = np.array([[[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]]])


def test_hits_follow_the_top_k_of_the_path_width() -> None:
    # Targets {0, 1}, k = 2: top-2 are {2,3}, {0,1}; a four-way tie is not a hit.
    assert hits_from_probs(PROBS_BTE, [0, 1]).tolist() == [[False, True, False]]
    assert hits_from_probs(PROBS_BTE, [1], width=3).tolist() == [[True, True, False]]
    assert hits_from_probs(PROBS_BTE, [2, 3], width=1).tolist() == [[True, False, False]]


def test_hits_agree_with_a_plain_top_k() -> None:
    probs_BTE = np.random.default_rng(0).dirichlet(np.ones(16), (4, 50))
    selected_BTK = np.argsort(-probs_BTE, axis=2)[:, :, :3]
    expected = hits_from_selection(selected_BTK, [2, 9, 11])
    assert 0 < expected.mean() < 1
    assert np.array_equal(hits_from_probs(probs_BTE, [2, 9, 11]), expected)


def test_acc_and_wsr_by_hand() -> None:
    # Two layers, three probes of 5, 5 and 2 scored tokens.
    mask_BT = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=bool)
    first = np.array([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=bool)
    second = np.array([[1, 1, 1, 1, 0], [0, 0, 0, 0, 1], [1, 0, 1, 1, 1]], dtype=bool)
    hits_LBT = np.stack([first, second])
    assert layer_accuracy(first, mask_BT) == Rate(7, 12)
    assert accuracy(hits_LBT, mask_BT) == Rate(13, 24)
    assert probe_accuracy(hits_LBT, mask_BT) == pytest.approx([0.8, 0.2, 0.75])
    assert wsr(hits_LBT, mask_BT, gamma=0.8) == Rate(1, 3)  # exactly 0.8 reaches 0.8
    assert wsr(hits_LBT, mask_BT, gamma=0.75) == Rate(2, 3)


def test_differences_compare_the_same_tokens() -> None:
    clean = np.full((1, 3, 4), 0.25)
    mask_BT = np.array([[True, True, False]])
    assert mass_difference(PROBS_BTE, clean, mask_BT) == pytest.approx([0, 0, 0, 0])
    assert mass_difference(PROBS_BTE[:, :1], clean[:, :1], mask_BT[:, :1]) == pytest.approx([-0.15, -0.05, 0.05, 0.15])
    triggered_BTK = np.array([[[0, 1], [0, 2], [3, 3]]])
    clean_BTK = np.array([[[2, 1], [0, 2], [0, 0]]])
    diff_E = selection_difference(triggered_BTK, clean_BTK, mask_BT, 5)
    assert diff_E.tolist() == [1, 0, -1, 0, 0]
    assert diff_E.dtype.kind == "i"


def test_bad_arrays_are_refused() -> None:
    mask_BT = np.ones((1, 3), dtype=bool)
    with pytest.raises(VerificationError, match="boolean mask of shape"):
        layer_accuracy(mask_BT, np.ones((1, 2), dtype=bool))
    with pytest.raises(VerificationError, match="scores no token"):
        layer_accuracy(mask_BT, ~mask_BT)
    with pytest.raises(VerificationError, match="probe 1 has no scored token"):
        wsr(np.ones((1, 2, 2), dtype=bool), np.array([[True, True], [False, False]]))
    with pytest.raises(VerificationError, match="same text tokens"):
        mass_difference(PROBS_BTE, PROBS_BTE[:, :2], mask_BT)
    with pytest.raises(VerificationError, match="distinct experts below 4"):
        hits_from_probs(PROBS_BTE, [4])
    with pytest.raises(VerificationError, match="exceeds the layer's 2 experts"):
        selection_difference(np.array([[[2]]]), np.array([[[0]]]), np.array([[True]]), 2)
