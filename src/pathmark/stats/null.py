"""The null distribution of the exact test: every path is equally likely, nothing else is assumed.

`NullDistribution` is made once for given measurements and answers for any number of target sets: a key,
all licensees of a registry, a million ground secrets. Its tables are computed on demand and kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pathmark.errors import VerificationError
from pathmark.stats.grid import (
    SHRINK,
    Floats,
    convolve,
    enumerated_counts,
    programmed_counts,
    subset_deficits,
)
from pathmark.stats.pvalue import PValue

Method = Literal["enumerated", "lattice", "grid"]
"""How a tail was computed: all paths counted; exactly on integers; bounded on a grid."""

ENUMERABLE = 2**17
"""A layer with at most so many subsets is enumerated, a larger one goes through the dynamic programme."""

LIST_LIMIT = 2**19
"""Longest list of partial sums kept by the exact count before it gives way to the grid."""

REFINE = 8
"""How much finer than the grid the dynamic programme runs."""

FIRST_SIZE, SHARED_SIZE, LAST_SIZE = 2**12, 2**14, 2**15
"""Grid cells: of a first look, of the tables shared by many statistics, and the most one tail may take."""

PRECISION = math.log10(1.01)
"""Wanted distance in log10 between the reported p and its certified lower bound."""

TOLERANCE = 1e-12
"""Sums closer than this share of the largest possible statistic are ties, and ties count against the mark."""

INFLATION = math.log10(1 + 1e-9)
"""Added to log10 p from a grid: it covers a million roundings of 1.2e-16 each, more than ever happen."""

EXACT_INTEGERS = 2.0**53
RESCALE = 600
"""Counts are divided by a power of two once they pass 2**RESCALE, long before float64 overflows."""


@dataclass(frozen=True)
class Tail:
    """P(T' >= T) over all paths: `p` is never too small, and the truth lies in [lower, p]."""

    p: PValue
    lower: PValue
    paths_reaching: int | None
    """How many paths do at least as well, where that is known exactly."""
    method: Method


@dataclass(frozen=True)
class _Table:
    """Cumulative path counts by deficit cell: the count is cumulative[c] * 2**exponent."""

    step: float
    slack: int
    """A path whose deficit was rounded into cell c has a true deficit below cell c + slack."""
    cumulative: Floats
    exponent: int


class NullDistribution:
    """Distribution of T = sum over layers of the sum of a uniformly random k-subset of that layer's values.

    `layers` holds for each layer the values of its pool and the width k. If all values are integers
    (selection counts) the answer is exact; otherwise it is rounded towards a larger p-value.
    """

    def __init__(self, layers: Sequence[tuple[NDArray[np.generic], int]]) -> None:
        self._layers: list[tuple[Floats, int]] = []
        self.n_paths = 1
        """Number of paths, an exact integer: the floor of p is one over it."""
        for values, width in layers:
            values_N = np.sort(np.asarray(values, dtype=np.float64))[::-1].copy()
            if values_N.ndim != 1 or not np.isfinite(values_N).all():
                raise VerificationError("expected a vector of finite numbers per layer; is a measurement missing?")
            if not 0 <= width <= len(values_N):
                raise VerificationError(f"expected 0 <= width <= {len(values_N)} (the pool), got {width}")
            self.n_paths *= math.comb(len(values_N), width)
            self._layers.append((values_N, width))
        self.maximum = math.fsum(v for values_N, k in self._layers for v in values_N[:k])
        """The largest statistic any path can reach."""
        self._minimum = math.fsum(v for values_N, k in self._layers for v in values_N[len(values_N) - k :])
        scale = math.fsum(k * float(np.abs(v).max(initial=0)) for v, k in self._layers)
        integral = all(np.array_equal(v, np.rint(v)) for v, _ in self._layers) and scale < EXACT_INTEGERS
        self._tolerance = 0.0 if integral else TOLERANCE * scale
        # A layer with a single subset adds a constant, which `maximum` holds already.
        self._layers = [(v, k) for v, k in self._layers if 0 < k < len(v)]
        self._deficits: dict[int, Floats] = {}
        self._tables: dict[tuple[int, int], _Table] = {}

    @property
    def floor(self) -> PValue:
        """The smallest p-value that any path can reach."""
        return PValue.of_counts(1, self.n_paths)

    def tail(self, statistic: float, *, enumerate_paths: bool = True) -> Tail:
        """P(T' >= statistic), ties included.

        Paths are counted exactly where lists of partial sums stay short: small spaces, and strong evidence
        in large ones. Otherwise a grid gives an upper and a lower bound, and is made as fine as it takes
        for the two to agree within 1 %, up to a limit. `enumerate_paths=False` goes to the grid at once.
        """
        deficit = self._deficit(np.asarray([statistic]))[0]
        if enumerate_paths and (reaching := self._count(deficit)) is not None:
            p = PValue.of_counts(reaching, self.n_paths)
            return Tail(p, p, reaching, "enumerated")
        tail = self._grid_tail(deficit, FIRST_SIZE)
        gap = tail.p.log10 - tail.lower.log10
        if gap > PRECISION:  # the gap shrinks as the grid grows
            size = min(LAST_SIZE, FIRST_SIZE * 2 ** math.ceil(math.log2(gap / PRECISION)))
            tail = self._grid_tail(deficit, size)
        return tail

    def log10_p(self, statistics: NDArray[np.float64], *, size: int = SHARED_SIZE) -> Floats:
        """Upper bounds on log10 P(T' >= t) for many statistics at once, from shared grids of `size` cells."""
        deficits = self._deficit(np.asarray(statistics, dtype=np.float64))
        result: Floats = np.zeros(deficits.shape)
        if self._span <= self._tolerance:
            return result
        windows = self._window(deficits)
        for window in np.unique(windows):
            here = windows == window
            table = self._shared_table(int(window), size)
            counts = table.cumulative[self._cells(deficits[here], table)]
            result[here] = self._log10(counts, table)
        return result

    @property
    def _span(self) -> float:
        return self.maximum - self._minimum

    def _deficit(self, statistics: Floats) -> Floats:
        if not np.isfinite(statistics).all():
            raise VerificationError("expected finite statistics, got nan or inf; is a measurement missing?")
        deficits = self.maximum - statistics
        if (deficits < -self._tolerance).any():
            raise VerificationError(
                f"statistic {statistics.max():.6g} exceeds what any path can reach ({self.maximum:.6g}); "
                "it must be the sum over the same values as the null's"
            )
        return np.clip(deficits, 0, self._span)

    def _layer_deficits(self, index: int) -> Floats | None:
        values_N, k = self._layers[index]
        if math.comb(len(values_N), k) > ENUMERABLE:
            return None
        if index not in self._deficits:
            self._deficits[index] = subset_deficits(values_N, k)
        return self._deficits[index]

    def _count(self, deficit: float) -> int | None:
        """Number of paths with at most this deficit, counted; None if lists would grow too long.

        Layers are merged into two lists of partial deficits, each cut at the limit; pairs of the two are
        then counted by bisection.
        """
        limit = deficit + self._tolerance
        lists = [np.zeros(1), np.zeros(1)]
        for index in range(len(self._layers)):
            deficits = self._layer_deficits(index)
            if deficits is None:
                return None
            deficits = deficits[: np.searchsorted(deficits, limit, side="right")]
            shorter = 0 if len(lists[0]) <= len(lists[1]) else 1
            if len(lists[shorter]) * len(deficits) > LIST_LIMIT:
                return None
            sums = np.add.outer(lists[shorter], deficits).ravel()
            lists[shorter] = sums[sums <= limit]
        first, second = lists[0], np.sort(lists[1])
        return int(np.searchsorted(second, limit - first, side="right").sum())

    def _window(self, deficits: Floats) -> NDArray[np.int64]:
        """Which of the shared grids to use: grid w ends at span / 2**w, and w is as large as can be."""
        with np.errstate(divide="ignore"):
            exact = np.log2(self._span / (deficits + self._tolerance) * (1 - SHRINK))
        return np.asarray(np.clip(np.floor(exact), 0, 60), dtype=np.int64)

    def _grid_tail(self, deficit: float, size: int) -> Tail:
        if self._span <= self._tolerance:  # all paths tie
            one = PValue(0.0)
            return Tail(one, one, self.n_paths, "lattice")
        end = max(deficit, self._tolerance, 1.0 if self._tolerance == 0 else 0.0)
        table = self._make_table(end, size)
        cell = int(self._cells(np.asarray([deficit]), table)[0])
        count = float(table.cumulative[cell])
        method: Method = "grid" if table.slack else "lattice"
        # The observed path is always among those counted, so a count of one is exact on any grid.
        if table.exponent == 0 and (count == 1 or (table.slack == 0 and count < EXACT_INTEGERS)):
            p = PValue.of_counts(int(count), self.n_paths)
            return Tail(p, p, int(count), method)
        p = PValue(float(self._log10(np.asarray([count]), table)[0]))
        lower = self.floor
        if cell > table.slack:
            safe = cell - table.slack - 1 if table.slack else cell
            log10_safe = self._log10(table.cumulative[safe : safe + 1], table)[0]
            lower = max(lower, PValue.capped(float(log10_safe) - 2 * INFLATION))
        return Tail(p, min(lower, p), None, method)

    def _cells(self, deficits: Floats, table: _Table) -> NDArray[np.int64]:
        """Cells of observed deficits, rounded away from 0: the observation is made weaker."""
        grown = deficits / table.step
        if self._tolerance:
            grown = (deficits + self._tolerance) / table.step * (1 + SHRINK)
        cells = np.floor(grown).astype(np.int64)
        assert cells.max(initial=0) < len(table.cumulative)  # clamping would make p too small
        return cells

    def _log10(self, counts: Floats, table: _Table) -> Floats:
        """log10 of counts over all paths, inflated."""
        with np.errstate(divide="ignore"):  # an empty cell is clipped to the floor
            logs = np.log10(counts) + table.exponent * math.log10(2) - math.log10(self.n_paths)
        return np.clip(logs + INFLATION, self.floor.log10, 0.0)

    def _shared_table(self, window: int, size: int) -> _Table:
        if (window, size) not in self._tables:
            self._tables[window, size] = self._make_table(self._span / 2**window, size)
        return self._tables[window, size]

    def _make_table(self, end: float, size: int) -> _Table:
        """Counts of paths with deficits up to `end` on about `size` cells."""
        refine = REFINE
        if self._tolerance:
            # Steps well above the tolerance keep the slack at whole cells.
            step = max(end / size, 4 * (len(self._layers) + 2) * self._tolerance)
        elif end <= size:
            step, refine = 1.0, 1
        else:
            step = float(REFINE * math.ceil(end / (size * REFINE)))
        n_cells = int(end / step) + 2
        total, exponent, slack = np.empty(0), 0, 0.0
        for index, (values_N, k) in enumerate(self._layers):
            deficits = self._layer_deficits(index)
            if deficits is None:
                counts = programmed_counts(values_N, k, step, n_cells, self._tolerance, refine)
                slack += 1 + k / refine
            else:
                counts = enumerated_counts(deficits, step, n_cells, self._tolerance)
                slack += 1
            total = convolve(total, counts) if index else counts
            excess = math.frexp(float(total.max()))[1] - RESCALE
            if excess > 0:
                total, exponent = np.ldexp(total, -excess), exponent + excess
        exact = self._tolerance == 0 and step == 1
        return _Table(step, 0 if exact else math.ceil(slack), np.cumsum(total), exponent)
