"""A p-value that survives far below the smallest float: it is kept as its decimal logarithm."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pathmark.errors import VerificationError

SMALLEST_FLOAT = math.ulp(0.0)
"""The smallest positive float. A p-value below it is reported as this, because no p-value is zero."""

_SCALES = ((15, "quadrillion"), (12, "trillion"), (9, "billion"), (6, "million"))


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

    @property
    def odds(self) -> str:
        """The chance as `1 in so many`, rounded so that it is never told smaller than it is.

        >>> PValue(-9.92).odds
        '1 in 8.3 billion'
        """
        if self.log10 > -0.3:
            return "more than 1 in 2"
        if self.log10 <= -18:
            return f"1 in a number of {int(-self.log10) + 1} digits"
        count = 10**-self.log10 * (1 + 1e-9)  # 1e-6 is a million, whatever its logarithm was rounded to
        for exponent, name in _SCALES:
            if count >= 10**exponent:
                return f"1 in {_two_digits(count / 10**exponent)} {name}"
        return f"1 in {_two_digits(count)}"

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


def _two_digits(count: float) -> str:
    """Rounded down to two digits."""
    if count < 10:
        return f"{int(count * 10) / 10:g}"
    step = 10 ** (len(str(int(count))) - 2)
    return f"{int(count / step) * step:,}"
