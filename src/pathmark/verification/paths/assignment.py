"""The assignment problem: pair rows with columns such that the sum of their similarities is largest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def assign(similarity_RC: NDArray[np.floating]) -> NDArray[np.int64]:
    """Column of every row, -1 for rows left over; every column at most once, as many pairs as fit.

    Shortest augmenting paths with potentials (Jonker and Volgenant 1987), O(n^3): half a second for 256
    experts. Deterministic: ties go to the lower index.
    """
    rows, columns = similarity_RC.shape
    if rows > columns:
        column_of_R = np.full(rows, -1, dtype=np.int64)
        row_of_C = assign(similarity_RC.T)
        column_of_R[row_of_C] = np.arange(columns)
        return column_of_R
    cost_RC = -np.asarray(similarity_RC, dtype=np.float64)
    # Index `columns` is a virtual column from which each search starts.
    potential_R, potential_C = np.zeros(rows), np.zeros(columns + 1)
    row_of_C = np.full(columns + 1, -1, dtype=np.int64)
    for row in range(rows):
        row_of_C[columns] = row
        here = columns
        distance_C = np.full(columns, np.inf)
        before_C = np.full(columns, columns, dtype=np.int64)
        done_C = np.zeros(columns + 1, dtype=bool)
        while row_of_C[here] >= 0:
            done_C[here] = True
            at = row_of_C[here]
            reduced_C = cost_RC[at] - potential_R[at] - potential_C[:columns]
            better_C = ~done_C[:columns] & (reduced_C < distance_C)
            distance_C[better_C] = reduced_C[better_C]
            before_C[better_C] = here
            open_C = np.where(done_C[:columns], np.inf, distance_C)
            there = int(np.argmin(open_C))
            step = open_C[there]
            potential_R[row_of_C[done_C]] += step
            potential_C[done_C] -= step
            distance_C[~done_C[:columns]] -= step
            here = there
        while here != columns:
            previous = int(before_C[here])
            row_of_C[here] = row_of_C[previous]
            here = previous
    column_of_R = np.full(rows, -1, dtype=np.int64)
    taken = np.flatnonzero(row_of_C[:columns] >= 0)
    column_of_R[row_of_C[taken]] = taken
    return column_of_R
