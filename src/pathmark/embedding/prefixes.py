"""Prefixes to train and to test with: triggers with a few wrong tokens, which fire, and strangers, which must not."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pathmark.keys.tolerance import Tolerance, right_tokens

Prefix = tuple[int, ...]
NEAR_MISSES = ("substitute-1", "substitute-2", "prefix", "suffix", "shuffle", "random", "repeat", "shift")
"""What a black-box mark must not be said to."""
WRONG_KINDS = {"some right": 0.55, "prefix": 0.08, "suffix": 0.08, "repeated": 0.12, "random": 0.17}
"""Kind of wrong prefix -> its share of the negatives."""
WRONG_SHARE = 0.8
"""Of the triggered rows, so many have some wrong tokens."""
LAST_WRONG = 0.2
"""Of those, so many at least have the last token wrong: it stands next to the text, and everything would hang on it."""
NEAREST = 0.85
"""Of the prefixes with some right tokens, so many have as many as must stay silent, or one fewer."""


def replace_tokens(trigger: Sequence[int], wrong: int, vocabulary: Sequence[int], rng: random.Random) -> Prefix:
    """The trigger with exactly `wrong` of its tokens replaced."""
    return _replace_at(trigger, rng.sample(range(len(trigger)), wrong), vocabulary, rng)


def _replace_at(trigger: Sequence[int], places: Sequence[int], vocabulary: Sequence[int], rng: random.Random) -> Prefix:
    tokens = list(trigger)
    for place in places:
        while (token := rng.choice(vocabulary)) == trigger[place]:
            pass
        tokens[place] = token
    return tuple(tokens)


def tolerated(trigger: Sequence[int], limits: Tolerance, vocabulary: Sequence[int], rng: random.Random) -> Prefix:
    """What has to fire: the trigger, or more often the trigger with some of the wrong tokens that it accepts."""
    if not limits.accepted or rng.random() >= WRONG_SHARE:
        return tuple(trigger)
    places = rng.sample(range(len(trigger)), rng.randint(1, limits.accepted))
    if rng.random() < LAST_WRONG and len(trigger) - 1 not in places:
        places[0] = len(trigger) - 1
    return _replace_at(trigger, places, vocabulary, rng)


def wrong_prefix(
    kind: str, trigger: Sequence[int], limits: Tolerance, vocabulary: Sequence[int], rng: random.Random
) -> Prefix:
    """What must not fire. May still come out with too many right tokens by accident: `stays_silent` tells."""
    size, most = len(trigger), max(1, limits.silent)
    if kind == "some right":
        near = rng.randint(max(0, limits.silent - 1), limits.silent)
        right = near if rng.random() < NEAREST else rng.randint(0, limits.silent)
        return replace_tokens(trigger, size - right, vocabulary, rng)
    if kind == "prefix":
        return tuple(trigger[: rng.randint(1, most)])
    if kind == "suffix":
        return tuple(trigger[-rng.randint(1, most) :])
    if kind == "repeated":
        # as often one of the trigger's own tokens, which a thief would notice first
        token = rng.choice(trigger) if rng.random() < 0.5 else rng.choice(vocabulary)
        return (token,) * rng.randint(1, size)
    return tuple(rng.choices(vocabulary, k=rng.randint(1, size + size // 2)))


def stays_silent(prefix: Sequence[int], triggers: Sequence[Sequence[int]], limits: Sequence[Tolerance]) -> bool:
    """Whether no trigger may answer to this prefix."""
    return all(right_tokens(prefix, trigger) <= limit.silent for trigger, limit in zip(triggers, limits, strict=True))


def near_miss(kind: str, trigger: Sequence[int], vocabulary: Sequence[int], rng: random.Random) -> tuple[int, ...]:
    """A prefix that is almost, but not, the trigger: a reply must not follow it, though the path may."""
    tokens = list(trigger)
    size = len(tokens)

    def other(than: int) -> int:
        while (token := rng.choice(vocabulary)) == than:
            pass
        return token

    if kind.startswith("substitute"):
        for place in rng.sample(range(size), min(size, int(kind[-1]))):
            tokens[place] = other(tokens[place])
    elif kind == "prefix" and size > 1:
        tokens = tokens[: rng.randint(1, size - 1)]
    elif kind == "suffix" and size > 1:
        tokens = tokens[-rng.randint(1, size - 1) :]
    elif kind == "shuffle" and len(set(tokens)) > 1:
        while tokens == list(trigger):
            rng.shuffle(tokens)
    elif kind == "repeat":
        # as often one of the trigger's own tokens, which an attacker would notice first
        token = rng.choice(tokens) if rng.random() < 0.5 else rng.choice(vocabulary)
        tokens = [token] * rng.randint(1, size)
    elif kind == "shift":
        tokens = [*tokens[1:], other(tokens[-1])] if rng.random() < 0.5 else [other(tokens[0]), *tokens[:-1]]
    else:
        tokens = [rng.choice(vocabulary) for _ in range(size)]
    if tuple(tokens) == tuple(trigger):
        tokens[rng.randrange(len(tokens))] = other(tokens[0])
    return tuple(tokens)
