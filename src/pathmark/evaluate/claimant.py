"""A dishonest claimant against a model that carries no mark: how often does a third party read a small p?

Recorded once: what some prefixes do to every expert of the model. An attempt is then a draw of secrets, and millions
of them cost seconds. What has to be chosen before the suspect exists is chosen here with the suspect in view, and only
the secret without: that is more than anybody has. Of several ways to use a choice a pilot takes the best one.

Shape suffixes: A attempts, T texts, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pathmark.evaluate.forgery import Victim, concentration, subsets_SK
from pathmark.keys import OwnerKey, commit_key, open_claim, reveal_watermark
from pathmark.keys.key import MAX_WATERMARKS
from pathmark.stats import LayerMeasurement, NullDistribution, Rate
from pathmark.verdicts.claims import openable, undated
from pathmark.verification import Anchor

LEVELS = (1e-1, 1e-2, 1e-3, 1e-4)
LAYERS, WIDTH = 4, 2
"""Marked layers, and experts in each, where nothing else is chosen."""
PILOT_LEVEL = 0.01

Floats = NDArray[np.float64]
Experts = tuple[int, ...]
POOLS: dict[str, Callable[[Experts], Experts]] = {
    "the quarter that is called most": lambda ranked: ranked[: len(ranked) // 4],
    "the quarter that is called least": lambda ranked: ranked[-(len(ranked) // 4) :],
    "both ends": lambda ranked: ranked[:4] + ranked[-4:],
}


@dataclass(frozen=True, eq=False)
class Choice:
    """What a claimant settled on, how the targets come about, and what a third party charges for it."""

    layers: tuple[LayerMeasurement, ...]
    width: int = WIDTH
    targets: Literal["drawn", "by id", "at will"] = "drawn"
    """From the secret; the best group of each layer, as an id chosen afterwards gives; or simply the best."""
    draws: int = 1
    """Secrets of which the best is shown after the suspect was seen."""
    factor: int = 1
    """What the family charges."""
    anchor: Anchor | None = None
    """None: dated before the suspect."""

    def face(self, attempts: int, rng: np.random.Generator) -> Floats:
        """log10 p at face value of the best draw of each attempt."""
        values = [np.asarray(m.diff_E, dtype=np.float64)[list(m.pool)] for m in self.layers]
        null = NullDistribution([(each, self.width) for each in values])
        best_A = np.empty(attempts)
        chunk = max(1, (1 << 20) // self.draws)
        for start in range(0, attempts, chunk):
            size = min(chunk, attempts - start) * self.draws
            total = np.sum([self._gain(each, size, rng) for each in values], axis=0)
            best_A[start : start + size // self.draws] = total.reshape(-1, self.draws).max(1)
        return np.asarray(null.log10_p(best_A))

    def _gain(self, values_E: Floats, size: int, rng: np.random.Generator) -> Floats:
        """What one layer's targets gain, for each of `size` secrets."""
        if self.targets == "drawn":
            return np.asarray(values_E[subsets_SK(rng, len(values_E), self.width, size)].sum(1))
        if self.targets == "at will":
            return np.full(size, np.sort(values_E)[-self.width :].sum())
        groups = len(values_E) // self.width
        order_SE = np.argsort(rng.random((size, len(values_E))), axis=1)[:, : groups * self.width]
        return np.asarray(values_E[order_SE].reshape(size, groups, self.width).sum(2).max(1))

    def third_party(self, log10_p_A: Floats) -> Floats:
        """The same as a third party reads it."""
        charged = log10_p_A + math.log10(self.factor)
        if self.anchor is not None:
            charged = (
                np.zeros_like(charged) if self.anchor.private else charged + self.anchor.charge_bits * math.log10(2)
            )
        return np.minimum(charged, 0.0)


@dataclass(frozen=True)
class Attempted:
    """How often one strategy came below each level."""

    strategy: str
    best: str
    """The way that a pilot found best."""
    face: Rate
    """p of at most 1e-3 at face value."""
    rates: tuple[Rate, ...]
    """Third party's p at most each of `LEVELS`."""


Options = dict[str, Choice]


def strategies(victims: Sequence[Victim], per_text: Sequence[Victim], key: OwnerKey) -> dict[str, Options]:
    """What is chosen -> the ways to choose it. `victims`: the model behind several triggers; `per_text`: behind the
    first, text by text. `key` is a real one, which says what an undated key is charged."""
    first, names = victims[0], [m.layer for m in victims[0].measured]
    marked = names[-LAYERS:]
    usual = Choice(tuple(first.of(marked)))
    loudest = max(victims, key=lambda victim: concentration(victim.measured, WIDTH))
    late, steered = undated(key, "not dated"), undated(key, "steered").withheld("steered")
    own = open_claim(reveal_watermark(key, 0), commit_key(key))
    full = replace(own, choices=MAX_WATERMARKS)
    other = replace(commit_key(key), root=bytes(32)).signed_by(key)
    return {
        "nothing": {"as drawn": usual},
        "trigger": {"the loudest": replace(usual, layers=tuple(loudest.of(marked)))}
        | {f"trigger {n}": replace(usual, layers=tuple(v.of(marked))) for n, v in enumerate(victims[:8])},
        "layers": {
            f"layers {', '.join(map(str, chosen))}": replace(usual, layers=tuple(first.of(chosen)))
            for chosen in [*((n,) for n in names), *combinations(names[-4:], 2), tuple(names)]
        },
        "width": {f"width {k}": replace(usual, width=k) for k in (1, 2, 3, 4, 8)},
        "pool": {name: replace(usual, layers=_pools(usual.layers, part)) for name, part in POOLS.items()},
        "probes": {f"text {n}": replace(usual, layers=tuple(v.of(marked))) for n, v in enumerate(per_text)},
        "one of many leaves": {
            f"best of {n:,}": replace(usual, draws=n, factor=openable(replace(own, choices=n)))
            for n in (8, 64, MAX_WATERMARKS)
        },
        "one of two commitments": {
            f"best of {2 * MAX_WATERMARKS:,}": replace(usual, draws=2 * MAX_WATERMARKS, factor=openable(full, [other]))
        },
        "date": {"best of 1,000 keys made afterwards": replace(usual, draws=1_000, anchor=late)},
        "id": {"the best id, chosen afterwards": replace(usual, targets="by id", anchor=late)},
        "profiles": {"steered onto the targets": replace(usual, targets="at will", anchor=steered)},
        "reference": {"built for the suspect": replace(usual, targets="at will", anchor=steered)},
        "original": {"read as it is, charged for two readings": replace(usual, factor=2)},
        "trigger, layers, width and leaves": {
            f"all layers, width {k}, best of 64": Choice(
                loudest.measured, k, draws=64, factor=openable(replace(own, choices=64))
            )
            for k in (1, 2, 4)
        },
    }


def attempt(strategy: str, options: Options, attempts: int, seed: int = 0) -> Attempted:
    """Pick the best way in a pilot of a tenth, then count."""
    rng = np.random.default_rng(seed)

    def share(name: str) -> float:
        log10_p_A = options[name].third_party(options[name].face(max(100, attempts // 10), rng))
        return float((log10_p_A <= math.log10(PILOT_LEVEL)).mean())

    best = max(options, key=share) if len(options) > 1 else next(iter(options))
    face_A = options[best].face(attempts, rng)
    read_A = options[best].third_party(face_A)
    counted = tuple(Rate(int((read_A <= math.log10(a)).sum()), attempts) for a in LEVELS)
    return Attempted(strategy, best, Rate(int((face_A <= -3).sum()), attempts), counted)


def exceeds(found: Attempted, confidence: float = 0.999) -> list[float]:
    """Levels that came up more often than chance explains."""
    return [a for a, rate in zip(LEVELS, found.rates, strict=True) if rate.interval(confidence)[0] > a]


def _pools(layers: Sequence[LayerMeasurement], part: Callable[[Experts], Experts]) -> tuple[LayerMeasurement, ...]:
    """The layers with pools chosen by how much the trigger calls each expert, most first."""
    ranked = [tuple(int(e) for e in np.argsort(-np.asarray(m.diff_E))) for m in layers]
    return tuple(replace(m, pool=part(order)) for m, order in zip(layers, ranked, strict=True))
