"""A p-value that survives far below the smallest float: it is kept as its decimal logarithm."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pathmark.errors import VerificationError

SMALLEST_FLOAT = math.ulp(0.0)
"""The smallest positive float. A p-value below it is reported as this, because no p-value is zero."""


@dataclass(frozen=True, order=True)
class PValue:
    """A probability in (0, 1], stored as log10. Smaller is stronger evidence; values compare and sort.

    >>> str(PValue(-742.3))
    '5.0e-743'
    >>> PValue.of(0.25).value
    0.25
    """

    log10: float

    def __post_init__(self) -> None:
        if math.isnan(self.log10) or self.log10 > 0 or math.isinf(self.log10):
            raise VerificationError(
                f"a p-value needs a finite log10 of at most 0, got {self.log10}; use PValue.of(p) for a float"
            )

    @classmethod
    def of(cls, p: float) -> PValue:
        """From a float in (0, 1]."""
        if not 0 < p <= 1:
            raise VerificationError(f"a p-value lies in (0, 1], got {p}; zero is never reached, pass a bound")
        return cls(math.log10(p))

    @classmethod
    def capped(cls, log10: float) -> PValue:
        """From a bound on log10 that may exceed 0: probabilities above one become one."""
        return cls(min(0.0, log10))

    @classmethod
    def of_counts(cls, hits: int, total: int) -> PValue:
        """`hits` equally likely cases out of `total`, both of any size."""
        if not 0 < hits <= total:
            raise VerificationError(f"expected 1 <= hits <= total, got {hits} of {total}")
        return cls(min(0.0, math.log10(hits) - math.log10(total)))

    @property
    def value(self) -> float:
        """As a float, at least the smallest positive one."""
        if self.log10 < -320:  # 10**x would lose all its digits in the subnormal range
            return SMALLEST_FLOAT
        return max(math.pow(10, self.log10), SMALLEST_FLOAT)

    def charged(self, log10_factor: float) -> PValue:
        """Multiplied by 10**log10_factor (a Bonferroni or grinding charge), capped at 1."""
        if log10_factor < 0:
            raise VerificationError(f"a charge cannot make a p-value smaller, got 10**{log10_factor}")
        return PValue.capped(self.log10 + log10_factor)

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        if self.log10 > -3:
            return f"{self.value:.2g}"
        exponent = math.floor(self.log10)
        mantissa = f"{10 ** (self.log10 - exponent):.1f}"
        if mantissa == "10.0":
            mantissa, exponent = "1.0", exponent + 1
        return f"{mantissa}e{exponent:+03d}"
