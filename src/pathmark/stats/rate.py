"""A rate never travels without its n: `Rate(hits, n)` with the exact Clopper-Pearson interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pathmark.errors import VerificationError


@dataclass(frozen=True)
class Rate:
    """`hits` of `n` independent trials.

    >>> print(Rate(97, 100))
    97/100 = 97.0 % [91.5, 99.4]
    """

    hits: int
    n: int

    def __post_init__(self) -> None:
        if self.n < 1 or not 0 <= self.hits <= self.n:
            raise VerificationError(f"expected 0 <= hits <= n and n >= 1, got hits={self.hits}, n={self.n}")

    @property
    def value(self) -> float:
        """The share hits/n."""
        return self.hits / self.n

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The Clopper-Pearson interval: it covers the true rate with at least `confidence`, for every n.

        Each end is the rate at which the observation, or one more extreme, has probability
        (1 - confidence) / 2. It is exact for independent trials, and only for those.
        """
        if not 0 < confidence < 1:
            raise VerificationError(f"confidence lies between 0 and 1, got {confidence}; 0.95 is usual")
        tail = (1 - confidence) / 2
        misses = self.n - self.hits
        low = 0.0 if self.hits == 0 else beta_quantile(tail, self.hits, misses + 1)
        high = 1.0 if misses == 0 else 1 - beta_quantile(tail, misses, self.hits + 1)
        return low, high

    def summary(self) -> dict[str, Any]:
        """JSON object: hits, n and the 95 % interval."""
        return {"hits": self.hits, "n": self.n, "interval": list(self.interval())}

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.hits}/{self.n} = {100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def beta_quantile(probability: float, a: float, b: float) -> float:
    """The x at which the regularised incomplete beta function I_x(a, b) reaches `probability`."""
    low, high = 0.0, 1.0
    while True:
        middle = (low + high) / 2
        # Stops at the float grid: relative precision near 0, where small rates live.
        if not low < middle < high:
            return middle
        if incomplete_beta(middle, a, b) < probability:
            low = middle
        else:
            high = middle


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta I_x(a, b), i.e. P(Binomial(a+b-1, x) >= a) for integers a and b."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    # The continued fraction converges quickly only left of the mean; the other side is its mirror.
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_fraction(1 - x, b, a)
    return _beta_fraction(x, a, b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Lentz's evaluation of the continued fraction of I_x(a, b) (Abramowitz and Stegun 26.5.8)."""
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300  # keeps a vanishing denominator from dividing by zero
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    fraction = d
    for m in range(1, 100_000):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / ((1 + step * d) or tiny)
            c = (1 + step / c) or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(log_front) * fraction / a
