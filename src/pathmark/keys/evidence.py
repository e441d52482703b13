"""How much a watermark can say: exact counts of ids and of paths, on plain integers.

Ids and evidence are two numbers. An id chooses among the *groups* of a block; the evidence is that
the targets are one of all *k-subsets* of the pool. For the paper's example (60 experts, k = 2,
6 layers) these are 29.4 and 64.7 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import comb, log2, prod


def path_counts(pool_sizes: Sequence[int], widths: Sequence[int]) -> tuple[int, ...]:
    """C(pool, k) per layer: the target sets that a key could have had there."""
    return tuple(comb(size, width) for size, width in zip(pool_sizes, widths, strict=True))


def paths_after_erasures(counts: Sequence[int], erased: int) -> int:
    """Paths that remain when the `erased` layers with most target sets are gone: the worst case."""
    if erased < 0:
        raise ValueError(f"erased layers cannot be negative, got {erased}")
    return prod(sorted(counts)[: max(len(counts) - erased, 0)])


def smallest_p_value(paths: int) -> Fraction:
    """The floor of the exact test: one over the number of paths."""
    return Fraction(1, paths)


def bits(count: int) -> float:
    """log2 of an exact count, also where it exceeds the range of floating point."""
    if count < 1:
        raise ValueError(f"a count is at least 1, got {count}")
    shift = max(count.bit_length() - 64, 0)
    return log2(count >> shift) + shift
