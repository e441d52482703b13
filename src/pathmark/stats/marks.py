"""The black-box bound: how unlikely is it that a model says a mark it does not know?

A mark is drawn by the key from `2**bits` candidates. For a model that does not know the key the reply is
fixed first and the mark drawn afterwards: at most `max_starts` positions of a reply can begin with it, so
one reply holds it with probability at most max_starts * 2**-bits, and any of `trials` replies with at most
`trials` times that. A mark of free text was not drawn from anything, and has no such bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pathmark.errors import VerificationError
from pathmark.stats.pvalue import PValue


@dataclass(frozen=True, kw_only=True)
class MarkTrial:
    """One mark, asked for `trials` times and seen at least once, or not."""

    bits: float
    """log2 of the number of candidates that survived filtering."""
    max_starts: int
    """Positions of one reply at which the mark may begin, fixed beforehand by max_tokens."""
    trials: int
    """Replies looked at. Greedy repeats of one prompt are one reply, however often they are asked for."""
    seen: bool

    def __post_init__(self) -> None:
        if self.bits < 0 or self.max_starts < 1 or self.trials < 1:
            raise VerificationError(
                f"expected bits >= 0, max_starts >= 1, trials >= 1, got {self.bits}, {self.max_starts}, {self.trials}"
            )

    def log10_chance(self, drawn_before: int = 0) -> float:
        """log10 of max_starts * trials / (candidates left), at most 0."""
        # log2(2**b - j) without leaving the float range for marks of thousands of bits.
        left = drawn_before * 2.0**-self.bits
        if left >= 1:
            return 0.0
        log2_candidates = self.bits + math.log2(1 - left)
        return min(0.0, math.log10(self.max_starts * self.trials) - log2_candidates * math.log10(2))


def marks_p(trials: Sequence[MarkTrial]) -> PValue:
    """P(at least as many of these marks are seen) for a model that does not know them.

    Distinct marks are drawn without replacement, so given the earlier ones the j-th is uniform over the
    candidates left, and chances multiply by conditioning. With s of J marks seen, the bound sums the
    products over all s-subsets of the J, because any of them would have been reported.
    """
    if not trials:
        raise VerificationError("expected at least one mark, got none")
    seen = sum(trial.seen for trial in trials)
    if seen == 0:
        return PValue(0.0)
    # Elementary symmetric polynomial of the chances, in logarithms: sums[s] covers s-subsets.
    sums = [0.0] + [-math.inf] * seen
    for drawn_before, trial in enumerate(trials):
        chance = trial.log10_chance(drawn_before)
        for s in range(seen, 0, -1):
            sums[s] = _log10_add(sums[s], sums[s - 1] + chance)
    return PValue.capped(sums[seen])


def _log10_add(a: float, b: float) -> float:
    low, high = min(a, b), max(a, b)
    return high if math.isinf(low) else high + math.log10(1 + 10 ** (low - high))
