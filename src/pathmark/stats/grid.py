"""Counting subsets by their sum, and convolving such counts, with non-negative terms only.

A *deficit* is how far the sum of a k-subset falls short of the largest possible one. Deficits are
non-negative and small where evidence is strong, so a grid that starts at deficit 0 puts its resolution
where the tail is. Counts are float64: exact integers up to 2**53, and beyond that sums and products of
non-negative numbers, whose relative error stays near the machine's (no subtraction, no FFT).

Shape suffixes: N pool experts in descending order of value, C grid cells.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BLOCK = 128
"""Side of the blocks that `convolve` hands to matrix multiplication."""

SHRINK = 1e-12
"""Relative safety when a quotient is floored: far above the rounding error of one division."""


@lru_cache(maxsize=64)
def subset_ranks(n: int, k: int) -> NDArray[np.intp]:
    """All k-subsets of range(n), one ascending row each."""
    count = math.comb(n, k)
    flat = np.fromiter((i for subset in combinations(range(n), k) for i in subset), np.intp, count * k)
    ranks = flat.reshape(count, k)
    ranks.setflags(write=False)
    return ranks


def subset_deficits(values_N: Floats, k: int) -> Floats:
    """Deficits of all k-subsets of `values_N` (descending), in ascending order.

    The j-th best member of a subset is compared with the j-th best of all, so every term is >= 0.
    """
    gaps = values_N[:k] - values_N[subset_ranks(len(values_N), k)]
    deficits: Floats = np.sort(gaps.sum(axis=1))
    return deficits


def floor_cells(deficits: Floats, step: float, tolerance: float) -> NDArray[np.int64]:
    """Cell of each deficit, rounded towards 0, i.e. towards a larger p-value.

    With a tolerance of 0 deficits and step are integers and the quotient's floor is exact as it is.
    """
    if tolerance == 0:
        return np.asarray(np.floor(deficits / step), dtype=np.int64)
    shrunk = np.maximum(deficits - tolerance, 0) / step * (1 - SHRINK)
    return np.asarray(np.floor(shrunk), dtype=np.int64)


def enumerated_counts(deficits: Floats, step: float, n_cells: int, tolerance: float) -> Floats:
    """Number of subsets per cell, for enumerated deficits; what lies beyond the grid is left out."""
    cells = floor_cells(deficits, step, tolerance)
    counts: Floats = np.bincount(cells[cells < n_cells], minlength=n_cells).astype(np.float64)
    return counts


def programmed_counts(values_N: Floats, k: int, step: float, n_cells: int, tolerance: float, refine: int) -> Floats:
    """Number of k-subsets per cell without enumerating them: a dynamic programme over experts.

    Experts come in descending order of value. The one of rank i, taken as the j-th member, adds
    values[j] - values[i] >= 0 to the deficit. The programme runs on a grid `refine` times finer, where
    each of the k terms is rounded down, and is then summed into the coarse cells, so that a deficit ends
    up at most 1 + k/refine cells too low, and never too high.
    """
    fine_step, n_fine = step / refine, n_cells * refine
    counts = np.zeros((k + 1, n_fine))
    counts[0, 0] = 1
    for i in range(len(values_N)):
        # Descending j: each expert is taken at most once.
        for j in range(min(i + 1, k), 0, -1):
            gap = np.asarray([values_N[j - 1] - values_N[i]])
            shift = int(floor_cells(gap, fine_step, tolerance)[0])
            if shift < n_fine:
                counts[j, shift:] += counts[j - 1, : n_fine - shift]
    coarse: Floats = counts[k].reshape(n_cells, refine).sum(axis=1)
    return coarse


def convolve(a_C: Floats, b_C: Floats) -> Floats:
    """First C cells of the convolution of two arrays of C cells, all terms kept.

    Direct, i.e. C*C/2 products, but arranged as products of a Toeplitz block with a matrix so that they
    run at the speed of matrix multiplication.
    """
    n_cells = len(a_C)
    n_blocks = -(-n_cells // BLOCK)
    padded = np.zeros(n_blocks * BLOCK)
    padded[:n_cells] = a_C
    columns = padded.reshape(n_blocks, BLOCK).T  # column m holds cells m*BLOCK ... of a
    kernel = np.zeros((n_blocks + 1) * BLOCK)
    kernel[BLOCK : BLOCK + n_cells] = b_C  # a block of zeros in front stands for negative lags
    lags = np.arange(BLOCK)[:, None] - np.arange(BLOCK)[None, :] + BLOCK
    out = np.zeros((BLOCK, n_blocks))
    for m in range(n_blocks):
        toeplitz = kernel[lags + m * BLOCK]
        if toeplitz.any():
            out[:, m:] += toeplitz @ columns[:, : n_blocks - m]
    return out.T.reshape(-1)[:n_cells].copy()
