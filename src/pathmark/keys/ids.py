"""Integer ids and group indices: exact capacity, and codes that survive lost layers.

An `IdCode` maps an id in [0, capacity) to one digit (group index) per layer. Three kinds, chosen by
how many layers may be lost (`redundancy`):

- 0: mixed radix, the first layer most significant. Capacity is the product of the group counts.
- 1: mixed radix on all layers but the one with most groups (the last of these), which holds the
  negated sum of the others modulo its own count m. Any one lost digit follows from the rest, since
  every digit is below m. Capacity: the product of the other counts, the most any such code can have.
- r >= 2: Reed-Solomon over the largest prime p that fits every layer: the id in base p gives the
  L - r coefficients of a polynomial (lowest first), and layer number i holds its value at i. Needs
  L <= p. Any r lost digits follow from the rest. Capacity p^(L - r).

Laws: decode(encode(n)) == n; two different ids differ in at least redundancy + 1 layers; decode with
up to `redundancy` digits replaced by None still gives n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from pathmark.errors import CapacityError


@dataclass(frozen=True)
class IdCode:
    """The code of one watermark's ids over layers with `radices[i]` groups each."""

    radices: tuple[int, ...]
    """Groups in the block, layer by layer."""
    redundancy: int = 0
    """How many layers may be lost without losing the id."""
    capacity: int = field(init=False)
    """Number of ids."""

    def __post_init__(self) -> None:
        L, r = len(self.radices), self.redundancy
        if not L or min(self.radices) < 1:
            raise CapacityError(f"an id needs at least one layer with at least one group, got {self.radices}")
        if not 0 <= r < L:
            raise CapacityError(f"redundancy must be between 0 and {L - 1} for {L} layers, got {r}")
        if r >= 2 and self.prime < L:
            raise CapacityError(
                f"redundancy {r} over {L} layers needs at least {L} groups (a prime) in every layer, "
                f"the smallest has {min(self.radices)}; try redundancy 0 or 1, fewer layers or less width"
            )
        object.__setattr__(self, "capacity", prod(self.data_radices))

    @property
    def prime(self) -> int:
        """The largest prime that fits every layer; 1 if there is none."""
        return largest_prime_upto(min(self.radices))

    @property
    def check_layer(self) -> int | None:
        """Position of the checksum for redundancy 1: the layer with most groups, the last of these."""
        if self.redundancy != 1:
            return None
        return max(range(len(self.radices)), key=lambda i: (self.radices[i], i))

    @property
    def data_radices(self) -> tuple[int, ...]:
        """Radices of the id's own digits, before redundancy is added."""
        if self.redundancy >= 2:
            return (self.prime,) * (len(self.radices) - self.redundancy)
        return tuple(r for i, r in enumerate(self.radices) if i != self.check_layer)

    def encode(self, number: int) -> tuple[int, ...]:
        """Group index per layer of one id."""
        if not 0 <= number < self.capacity:
            raise CapacityError(
                f"id {number} does not fit: ids run from 0 to {self.capacity - 1}; "
                "more layers, more groups or less redundancy give more ids"
            )
        if self.redundancy >= 2:
            coefficients = _to_digits(number, self.data_radices)[::-1]
            return tuple(evaluate(coefficients, x, self.prime) for x in range(len(self.radices)))
        digits = list(_to_digits(number, self.data_radices))
        if self.check_layer is not None:
            digits.insert(self.check_layer, -sum(digits) % self.radices[self.check_layer])
        return tuple(digits)

    def decode(self, digits: Sequence[int | None]) -> int | None:
        """The id of these group indices; None marks a lost layer.

        Returns None when the digits belong to no id: out of range, contradicting the redundancy, or
        more layers lost than it covers.
        """
        if len(digits) != len(self.radices):
            raise ValueError(f"expected {len(self.radices)} group indices, got {len(digits)}")
        known = [(i, d) for i, d in enumerate(digits) if d is not None]
        if len(digits) - len(known) > self.redundancy:
            return None
        if any(not 0 <= d < self.radices[i] for i, d in known):
            return None
        full = self._interpolate(known) if self.redundancy >= 2 else self._fill(dict(known))
        if full is None:
            return None
        number = _from_digits(full, self.data_radices)
        # The whole word is compared: a digit beyond those used above must agree as well.
        word = self.encode(number)
        return number if all(word[i] == d for i, d in known) else None

    def _fill(self, known: dict[int, int]) -> tuple[int, ...] | None:
        """Data digits for redundancy 0 or 1, the lost one from the checksum."""
        check = self.check_layer
        for i, radix in enumerate(self.radices):
            if i not in known:
                assert check is not None
                known[i] = -sum(known.values()) % self.radices[check]
                if known[i] >= radix:
                    return None
        return tuple(known[i] for i in range(len(self.radices)) if i != check)

    def _interpolate(self, known: list[tuple[int, int]]) -> tuple[int, ...] | None:
        """Coefficients, highest first, of the polynomial through the first L - r known points."""
        p, K = self.prime, len(self.data_radices)
        if any(d >= p for _, d in known):
            return None
        points = known[:K]
        total = [0] * K
        for i, (x, y) in enumerate(points):
            basis, scale = [1], 1
            for j, (other, _) in enumerate(points):
                if i != j:
                    shifted = [0, *basis]
                    basis = [(a - other * b) % p for a, b in zip(shifted, [*basis, 0], strict=True)]
                    scale = scale * (x - other) % p
            factor = y * pow(scale, -1, p) % p
            total = [(t + factor * b) % p for t, b in zip(total, basis, strict=True)]
        return tuple(reversed(total))


def evaluate(coefficients: Sequence[int], x: int, prime: int) -> int:
    """Value at x of a polynomial over the integers modulo a prime, lowest coefficient first."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % prime
    return value


def largest_prime_upto(limit: int) -> int:
    """The largest prime that is not above the limit, or 1."""
    for n in range(limit, 1, -1):
        if all(n % d for d in range(2, int(n**0.5) + 1)):
            return n
    return 1


def _to_digits(number: int, radices: Sequence[int]) -> tuple[int, ...]:
    """Mixed radix, first digit most significant."""
    digits = []
    for radix in reversed(radices):
        number, digit = divmod(number, radix)
        digits.append(digit)
    return tuple(reversed(digits))


def _from_digits(digits: Sequence[int], radices: Sequence[int]) -> int:
    number = 0
    for digit, radix in zip(digits, radices, strict=True):
        number = number * radix + digit
    return number
