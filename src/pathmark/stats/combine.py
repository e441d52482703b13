"""Putting p-values together, and charging them for everything else that was tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from pathmark.errors import VerificationError
from pathmark.stats.pvalue import PValue

GRINDING_BITS = 80
"""What an undated key is charged: nobody is supposed to have tried more than 2**80 secrets."""


def fisher(p_values: Sequence[PValue]) -> PValue:
    """Fisher's method: P(product of J uniform variables <= the product seen), in closed form.

    That is q * sum_{i<J} (-ln q)^i / i! for the product q. Valid if each p-value, given the ones before it,
    is at most uniform: P(p <= a | earlier) <= a. The product alone is not a p-value.
    """
    if not p_values:
        raise VerificationError("expected at least one p-value, got none")
    log_q = math.log(10) * math.fsum(p.log10 for p in p_values)
    if log_q == 0:
        return PValue(0.0)
    terms = [i * math.log(-log_q) - math.lgamma(i + 1) for i in range(len(p_values))]
    largest = max(terms)
    log_sum = largest + math.log(math.fsum(math.exp(term - largest) for term in terms))
    return PValue.capped((log_q + log_sum) / math.log(10))


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything that was tried before this p-value was looked at; all of it is one family.

    Each field counts attempts whose best outcome would have been reported.
    """

    keys: int = 1
    """Keys held against the suspect."""
    watermarks: int = 1
    """Watermarks that could have been opened in the place of this one."""
    ids: int = 1
    """Ids or licensees compared."""
    triggers: int = 1
    """Triggers per key."""
    statistics: int = 1
    """Statistics, e.g. masses and selection counts."""
    alignments: int = 1
    """Matchings of experts or layers."""
    suspects: int = 1
    """Models examined."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise VerificationError(f"{field.name}: at least 1 was tried, got {getattr(self, field.name)}")

    @property
    def size(self) -> int:
        """Number of p-values among which the reported one is the smallest."""
        return math.prod(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        tried = [f"{getattr(self, f.name)} {f.name}" for f in fields(self) if getattr(self, f.name) > 1]
        return f"{self.size} tried: {' x '.join(tried)}" if tried else "1 tried"

    def summary(self) -> dict[str, int]:
        """JSON object."""
        return asdict(self)


def bonferroni(p: PValue, family: Family) -> PValue:
    """The family-wise p-value: p times everything tried, capped at 1. Needs no independence."""
    return p.charged(math.log10(family.size))


def third_party_p(p: PValue, *, anchored: bool, grinding_bits: int = GRINDING_BITS) -> PValue:
    """What somebody else may believe.

    The owner knows that the key was not chosen to fit the model and takes p at face value. A third party
    may do so only if the key commitment is dated before the suspect's lineage was published (`anchored`);
    otherwise the key may be the best of many, and p is multiplied by 2**grinding_bits.
    """
    return p if anchored else p.charged(grinding_bits * math.log10(2))
