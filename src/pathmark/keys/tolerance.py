"""How much of a trigger has to be right.

A trigger of n tokens fires with up to `accepted` wrong tokens and stays silent with `silent` right ones or fewer; in
between anything goes. A mark that told its trigger from prefixes with one wrong token would have its boundary one token
away, and damage of that size would silence it. A thief does not know the other tokens, so nobody is protected by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log2

MIN_SECRET_BITS = 48.0
"""A trigger that is easier to guess than that is refused."""
FEWEST_TOKENS, MOST_TOKENS = 12, 64
"""Lengths among which a trigger's length is chosen where nobody asks for one."""


@dataclass(frozen=True)
class Tolerance:
    """What a trigger of this many tokens accepts, and what it must not answer to."""

    tokens: int
    accepted: int
    """Wrong tokens with which it still fires."""
    silent: int
    """Right tokens with which it must stay silent, and with fewer."""


def tolerance(tokens: int) -> Tolerance:
    """A quarter of the tokens may be wrong; half of them are not enough."""
    return Tolerance(tokens, tokens // 4, tokens // 2)


def right_tokens(prefix: Sequence[int], trigger: Sequence[int]) -> int:
    """How many of the trigger's tokens stand in their places, counted from the front or from the text, the larger."""
    front = sum(a == b for a, b in zip(prefix, trigger, strict=False))
    back = sum(a == b for a, b in zip(reversed(prefix), reversed(trigger), strict=False))
    return max(front, back)


def secret_bits(counts: Sequence[int], silent: int) -> float:
    """-log2 of the chance that one guess may fire: more than `silent` places right, each drawn as the trigger was.

    `counts` are the candidates of each place. Exact: the distribution of the number of right places is added up.
    """
    chances = [1.0, *(0.0 for _ in counts)]
    for count in counts:
        hit = 1.0 / count
        chances = [chances[m] * (1 - hit) + (chances[m - 1] * hit if m else 0.0) for m in range(len(chances))]
    fires = sum(sorted(chances[silent + 1 :]))
    return -log2(fires) if fires else inf
