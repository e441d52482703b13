"""From routing arrays to the paper's measures (Acc_l, Acc, WSR) and to the input of the exact test.

Arrays come in, never a model. Shape suffixes: L layers, B probes, T tokens, E experts, K experts selected
per token. A mask_BT tells which tokens are scored; padding and the trigger itself are not.

Token-level rates carry n tokens, which are not independent: the interval of `layer_accuracy` describes the
tokens at hand, the interval of `wsr` may be read as one over probes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pathmark.errors import VerificationError
from pathmark.stats.rate import Rate

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]


def hits_from_probs(probs_BTE: Floats, targets: Sequence[int], width: int | None = None) -> Bools:
    """hits_BT: is a target among the `width` most probable experts? The indicator inside Acc_l.

    `width` is the path width k_l (default: the number of targets), or the model's own top-k. An expert that
    ties with the best target counts as more probable, so that a tie is never a hit by luck.
    """
    if probs_BTE.ndim != 3:
        raise VerificationError(f"expected probs_BTE (probe, token, expert), got shape {probs_BTE.shape}")
    _check_targets(targets, probs_BTE.shape[2])
    top = len(targets) if width is None else width
    if not 1 <= top <= probs_BTE.shape[2]:
        raise VerificationError(f"expected 1 <= width <= {probs_BTE.shape[2]}, got {top}")
    chosen = list(targets)
    best_BT = probs_BTE[:, :, chosen].max(axis=2)
    rivals_BTE = np.delete(probs_BTE, chosen, axis=2)
    ahead_BT = (rivals_BTE >= best_BT[:, :, None]).sum(axis=2)
    return np.asarray(ahead_BT < top)


def hits_from_selection(selected_BTK: NDArray[np.integer], targets: Sequence[int]) -> Bools:
    """hits_BT where only the router's decisions are known: is a target among the selected experts?"""
    if selected_BTK.ndim != 3:
        raise VerificationError(f"expected selected_BTK (probe, token, choice), got {selected_BTK.shape}")
    return np.asarray(np.isin(selected_BTK, list(targets)).any(axis=2))


def layer_accuracy(hits_BT: Bools, mask_BT: Bools) -> Rate:
    """Acc_l: the share of scored tokens that touch a target (section "White-Box Verification")."""
    _check_mask(hits_BT, mask_BT)
    return Rate(int(hits_BT[mask_BT].sum()), int(mask_BT.sum()))


def accuracy(hits_LBT: Bools, mask_BT: Bools) -> Rate:
    """Acc: the mean of Acc_l over layers; as every layer scores the same tokens, also their pooled rate."""
    _check_mask(hits_LBT[0], mask_BT)
    return Rate(int(hits_LBT[:, mask_BT].sum()), int(mask_BT.sum()) * len(hits_LBT))


def probe_accuracy(hits_LBT: Bools, mask_BT: Bools) -> NDArray[np.float64]:
    """acc_B: Acc of each probe alone."""
    _check_mask(hits_LBT[0], mask_BT)
    tokens_B = mask_BT.sum(axis=1)
    if (tokens_B == 0).any():
        raise VerificationError(f"probe {int(tokens_B.argmin())} has no scored token; drop it or fix the mask")
    return np.asarray((hits_LBT & mask_BT).sum(axis=(0, 2)) / (tokens_B * len(hits_LBT)))


def wsr(hits_LBT: Bools, mask_BT: Bools, gamma: float = 0.8) -> Rate:
    """WSR: the share of probes with Acc >= gamma. On triggered probes; on clean ones it is an FPR."""
    if not 0 < gamma <= 1:
        raise VerificationError(f"gamma is a share in (0, 1], got {gamma}; the paper uses 0.8")
    acc_B = probe_accuracy(hits_LBT, mask_BT)
    # 4 of 5 tokens must reach 0.8 although neither is a binary fraction.
    return Rate(int((acc_B >= gamma - 1e-12).sum()), len(acc_B))


def mass_difference(triggered_BTE: Floats, clean_BTE: Floats, mask_BT: Bools) -> NDArray[np.float64]:
    """diff_E of the exact test: mean routing mass per expert, triggered minus clean, on the same text tokens.

    Both arrays hold the same tokens of the same texts: the trigger's own tokens are already cut off.
    """
    if triggered_BTE.shape != clean_BTE.shape:
        raise VerificationError(
            f"triggered {triggered_BTE.shape} and clean {clean_BTE.shape} must hold the same text tokens"
        )
    _check_mask(triggered_BTE[:, :, 0], mask_BT)
    change = triggered_BTE[mask_BT].astype(np.float64) - clean_BTE[mask_BT].astype(np.float64)
    return np.asarray(change.mean(axis=0))


def selection_difference(
    triggered_BTK: NDArray[np.integer], clean_BTK: NDArray[np.integer], mask_BT: Bools, n_experts: int
) -> NDArray[np.int64]:
    """diff_E in selection counts, where only decisions are known: integers, which the test takes exactly."""
    if triggered_BTK.shape[:2] != clean_BTK.shape[:2]:
        raise VerificationError(
            f"triggered {triggered_BTK.shape} and clean {clean_BTK.shape} must hold the same text tokens"
        )
    _check_mask(triggered_BTK[:, :, 0], mask_BT)
    counts = [np.bincount(selected[mask_BT].ravel(), minlength=n_experts) for selected in (triggered_BTK, clean_BTK)]
    if max(map(len, counts)) != n_experts:
        raise VerificationError(f"an expert index exceeds the layer's {n_experts} experts")
    return np.asarray(counts[0] - counts[1], dtype=np.int64)


def _check_mask(per_token_BT: NDArray[np.generic], mask_BT: Bools) -> None:
    if mask_BT.dtype != np.bool_ or mask_BT.shape != per_token_BT.shape:
        raise VerificationError(
            f"expected a boolean mask of shape {per_token_BT.shape}, got {mask_BT.dtype}{mask_BT.shape}"
        )
    if not mask_BT.any():
        raise VerificationError("the mask scores no token at all; are the probes longer than the trigger?")


def _check_targets(targets: Sequence[int], n_experts: int) -> None:
    if not targets or len(set(targets)) != len(targets) or not set(targets) <= set(range(n_experts)):
        raise VerificationError(f"targets must be distinct experts below {n_experts}, got {list(targets)}")
