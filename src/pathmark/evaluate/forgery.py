"""Can anybody make a key that verifies on a model that is not theirs?

Whoever sees a model first and chooses a key afterwards can always reach a small p-value: the best of N keys has p about
1/N. Here that is done, with everything a forger may choose, and the claim is then read as a third party reads it
(`verify.judge_anchor`): a key that is not dated before the suspect is charged for its hashing and for its free choices.

Deriving the targets of a secret takes a millisecond in plain Python, making a whole key with its checks up to a tenth
of a second. Under the key format the targets are a uniform k-subset of each pool, independent between layers, so
`grind_paths` draws such subsets directly, about a million per second; `grind_secrets` makes real keys, fewer of them,
and comes equally far per key tried.

Shape suffixes: S secrets tried, K targets of a layer, E experts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from pathmark.errors import VerificationError
from pathmark.evaluate.dispute import SIGNIFICANCE
from pathmark.keys import (
    LayerPlan,
    ModelFacts,
    OwnerKey,
    TextCodec,
    WatermarkRequest,
    create_key,
)
from pathmark.keys.layout import cut_groups
from pathmark.stats import LayerMeasurement, NullDistribution, PValue, exact_test, mass_difference
from pathmark.verification import Anchor, judge_anchor, record_routes

TRIGGER_TEXT, MARK_TEXT = "@@@@@@@@", "####"
CHUNK = 1 << 17


@dataclass(frozen=True)
class Forgery:
    """The best claim that one way of forging came to."""

    name: str
    tried: int
    """Keys, paths or claims that were tried."""
    p: PValue
    """Of the best one, at face value."""
    p_third_party: PValue
    """The same for somebody who does not know when the key was made."""
    charge_bits: int
    """What that reader charges."""
    significance: float
    reason: str
    """Why the claim is charged, or why not."""

    @classmethod
    def refused(cls, name: str, p: PValue, reason: str, tried: int = 1) -> Forgery:
        """A claim that was not even read."""
        return cls(name, tried, p, PValue(0.0), 0, SIGNIFICANCE, reason)

    @property
    def accepted(self) -> bool:
        """Whether a third party has to believe the forged claim."""
        return self.p_third_party.value <= self.significance

    def summary(self) -> dict[str, Any]:
        """JSON object."""
        return {
            "name": self.name,
            "tried": self.tried,
            "log10_p": self.p.log10,
            "log10_p_third_party": self.p_third_party.log10,
            "charge_bits": self.charge_bits,
            "accepted": self.accepted,
            "reason": self.reason,
        }


@dataclass(frozen=True, eq=False)
class Victim:
    """A model that belongs to somebody else, as the forger sees it: its facts, and what a trigger does to it."""

    facts: ModelFacts
    codec: TextCodec
    measured: tuple[LayerMeasurement, ...]
    """All layers that the forger may claim; pools are all experts."""

    def plans(self, layers: Sequence[int], width: int) -> tuple[LayerPlan, ...]:
        """Plans with all experts as pool."""
        return tuple(
            LayerPlan(n, experts, width, tuple(range(experts)), "all")
            for n, experts in ((n, self.facts.layer(n).experts) for n in sorted(layers))
        )

    def of(self, layers: Sequence[int]) -> list[LayerMeasurement]:
        """Measurements of some layers."""
        by_layer = {m.layer: m for m in self.measured}
        if missing := sorted(set(layers) - by_layer.keys()):
            raise VerificationError(f"layers {missing} were not measured; got {sorted(by_layer)}")
        return [by_layer[n] for n in layers]

    def key(self, plans: Sequence[LayerPlan], secret: bytes, id: int | None = None) -> OwnerKey:
        """A real key with the forger's free-text trigger."""
        request = WatermarkRequest(plans=tuple(plans), id=id, trigger_texts=(TRIGGER_TEXT,), mark_texts=(MARK_TEXT,))
        return create_key(self.facts, [request], self.codec, owner="forger", secret=secret)[0]


def observe_trigger(
    model: nn.Module, layers: Sequence[int], prefixes: Sequence[tuple[int, ...]], probes: Sequence[Sequence[int]]
) -> list[tuple[LayerMeasurement, ...]]:
    """What each prefix does to every expert of the layers: the input of the exact test, with whole layers as pools."""
    clean = record_routes(model, probes, layers)
    found = []
    for prefix in prefixes:
        behind = record_routes(model, probes, layers, prefix=prefix)
        found.append(
            tuple(
                LayerMeasurement(
                    layer=n,
                    diff_E=mass_difference(behind.probs[n], clean.probs[n], clean.mask_BT),
                    pool=tuple(range(clean.n_experts(n))),
                )
                for n in layers
            )
        )
    return found


def grind_paths(
    victim: Victim, layers: Sequence[int], *, width: int = 2, count: int = 1_000_000, seed: int = 0
) -> Forgery:
    """Fixed trigger, many secrets, as target sets: the best of `count` uniform paths."""
    measured = victim.of(layers)
    best = _best_statistic(measured, width, count, seed)
    p = _null(measured, width).tail(best).p
    key = victim.key(victim.plans(layers, width), bytes(32))  # what any key of these plans is charged
    return _read(f"{count:,} paths behind one trigger", count, p, judge_anchor(key))


def grind_secrets(
    victim: Victim,
    layers: Sequence[int],
    *,
    width: int = 2,
    count: int = 1_000,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> tuple[Forgery, OwnerKey]:
    """The same with real keys from real secrets; also returns the best of them."""
    rng = random.Random(seed)
    plans, measured = victim.plans(layers, width), victim.of(layers)
    best: tuple[float, OwnerKey] | None = None
    for _ in range(count):
        key = victim.key(plans, rng.randbytes(32))
        statistic = _statistic(key, measured)
        if best is None or statistic > best[0]:
            best = statistic, key
        if progress is not None:
            progress(1)
    assert best is not None
    key = best[1]
    p = claim_p(key, measured)
    return _read(f"{count:,} real keys behind one trigger", count, p, judge_anchor(key)), key


def grind_triggers(
    victims: Sequence[Victim], layers: Sequence[int], *, width: int = 2, count: int = 1_000_000, seed: int = 0
) -> Forgery:
    """Many triggers first: the one whose effect is most concentrated, then secrets against it.

    `victims` are the same model behind different prefixes. The effect of a trigger on any set of targets is what the
    exact test conditions on, so a loud trigger buys nothing; trying it costs one more try.
    """
    loudest = max(victims, key=lambda victim: concentration(victim.of(layers), width))
    best = grind_paths(loudest, layers, width=width, count=count, seed=seed)
    tried = count + len(victims)
    name = f"{len(victims):,} triggers, then {count:,} paths behind the loudest"
    return Forgery(name, tried, best.p, best.p_third_party, best.charge_bits, best.significance, best.reason)


def choose_freely(
    victim: Victim,
    *,
    widths: Sequence[int] = (1, 2, 3, 4, 6, 8, 12, 16, 24),
    pools: int = 60,
    secrets: int = 10,
    seed: int = 0,
) -> tuple[Forgery, OwnerKey]:
    """Everything that needs no hashing: layers, a width and a pool for each, and the id, for a few real secrets.

    Per layer the forger tries the whole layer as pool and pools that leave out one or two experts, each width and each
    group, or leaves the layer out; layer by layer it takes what adds most evidence beyond its charge, until nothing
    changes. The key that comes out is real, and its p-value exact.
    """
    rng = random.Random(seed)
    best: tuple[float, PValue, OwnerKey] | None = None
    tried = 0
    for _ in range(secrets):
        secret = rng.randbytes(32)
        subkey = victim.key(victim.plans([victim.measured[0].layer], 1), secret).watermarks[0].subkey.reveal()
        options = [_options(m, subkey, widths, _pools(m, pools, rng)) for m in victim.measured]
        tried += sum(len(of_layer) for of_layer in options)
        chosen = _climb(options)
        blank = victim.key([option.plan for option in chosen], secret, 0)
        number = blank.watermarks[0].decode_id([option.group for option in chosen])
        assert number is not None  # without redundancy every row of digits is an id
        key = blank.with_id(number)
        p = claim_p(key, victim.measured)
        short_bits = judge_anchor(key).charge_bits + p.log10 / math.log10(2)
        if best is None or short_bits < best[0]:
            best = short_bits, p, key
    assert best is not None
    name = f"layers, widths, pools and ids chosen freely for {secrets:,} secrets"
    return _read(name, tried, best[1], judge_anchor(best[2])), best[2]


def claim_p(key: OwnerKey, measured: Sequence[LayerMeasurement]) -> PValue:
    """p at face value of a key's first watermark on measured layers, in the key's own pools."""
    watermark = key.watermarks[0]
    by_layer = {m.layer: m for m in measured}
    aimed = [
        LayerMeasurement(n, by_layer[n].diff_E, watermark.pool(n)).aim(watermark.targets(n)) for n in watermark.layers
    ]
    return exact_test(aimed).p


def concentration(measured: Sequence[LayerMeasurement], width: int) -> float:
    """Mass that the `width` most gaining experts of each layer gain, added up."""
    return float(sum(np.sort(np.asarray(m.diff_E, dtype=np.float64))[-width:].sum() for m in measured))


@dataclass(frozen=True)
class _Option:
    """One thing that a forger may claim in one layer."""

    plan: LayerPlan
    group: int
    excess: float
    """Sum of d over the targets, above what a random set of that width has."""
    variance: float
    """Of that sum over random sets."""
    charge_bits: float
    """What a third party charges for pool and group."""


def _options(
    measured: LayerMeasurement, subkey: bytes, widths: Sequence[int], pools: Sequence[tuple[int, ...]]
) -> list[_Option]:
    """The best group of each pool and width."""
    diff_E = np.asarray(measured.diff_E, dtype=np.float64)
    experts, found = len(diff_E), []
    for pool in pools:
        values = diff_E[list(pool)]
        size, mean, spread = len(pool), float(values.mean()), float(values.var())
        order = [e for (e,) in cut_groups(subkey, 0, measured.layer, pool, 1)]  # the same shuffle for every width
        for width in (k for k in widths if 2 * k <= size):
            sums = diff_E[[order[g * width : (g + 1) * width] for g in range(size // width)]].sum(1)
            group = int(sums.argmax())
            plan = LayerPlan(measured.layer, experts, width, pool, "all" if size == experts else "list")
            variance = width * spread * (size - width) / (size - 1)
            charge = math.log2(math.comb(experts, size)) + math.log2(len(sums))
            found.append(_Option(plan, group, float(sums[group]) - width * mean, variance, charge))
    return found


def _climb(options: Sequence[Sequence[_Option]]) -> list[_Option]:
    """Coordinate ascent over layers on evidence minus charge; the normal tail stands in for the exact one."""
    table = [np.array([(0.0, 0.0, 0.0), *((o.excess, o.variance, o.charge_bits) for o in each)]) for each in options]
    chosen = [int(_bits(rows).argmax()) for rows in table]
    net = -math.inf
    for _ in range(50):
        for place, rows in enumerate(table):
            others = sum(table[i][chosen[i]] for i in range(len(table)) if i != place)
            chosen[place] = int(_bits(rows + others).argmax())
        before, net = net, float(_bits(np.sum([rows[c] for rows, c in zip(table, chosen, strict=True)], axis=0)))
        if net <= before:
            break
    taken = [each[c - 1] for each, c in zip(options, chosen, strict=True) if c]
    # a claim needs a layer, even where none pays for itself
    return taken or [max((o for each in options for o in each), key=lambda o: o.excess / math.sqrt(o.variance))]


def _bits(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """log2 of one over the normal tail (its upper bound for z > 1), minus the charge; columns as in `_climb`."""
    excess, variance, charge = np.moveaxis(rows, -1, 0)
    z = excess / np.sqrt(np.maximum(variance, 1e-30))
    bits = np.where(z > 1, (z * z / 2 + np.log(np.maximum(z, 1) * math.sqrt(2 * math.pi))) / math.log(2), 1.0)
    result: NDArray[np.float64] = np.where(variance > 0, bits, 0.0) - charge
    return result


def _pools(measured: LayerMeasurement, count: int, rng: random.Random) -> list[tuple[int, ...]]:
    """The whole layer, each pool without one expert, then random ones without two, `count` in all."""
    everyone = tuple(measured.pool)
    left_out: list[tuple[int, ...]] = [(), *((e,) for e in everyone)]
    while len(left_out) < count:
        left_out.append(tuple(rng.sample(everyone, 2)))
    return [tuple(e for e in everyone if e not in out) for out in left_out[:count]]


def _best_statistic(measured: Sequence[LayerMeasurement], width: int, count: int, seed: int) -> float:
    """The largest T of `count` random paths."""
    rng = np.random.default_rng(seed)
    best = -math.inf
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        total_S = np.zeros(size)
        for m in measured:
            diff_E = np.asarray(m.diff_E, dtype=np.float64)[list(m.pool)]
            total_S += diff_E[subsets_SK(rng, len(diff_E), width, size)].sum(1)
        best = max(best, float(total_S.max()))
    return best


def subsets_SK(rng: np.random.Generator, experts: int, width: int, size: int) -> NDArray[np.int64]:
    """Uniform k-subsets: k draws with replacement, drawn again as long as two of them agree."""
    picks_SK = rng.integers(0, experts, (size, width))
    again = np.arange(size)
    while len(again := again[(np.diff(np.sort(picks_SK[again], axis=1), axis=1) == 0).any(1)]):
        picks_SK[again] = rng.integers(0, experts, (len(again), width))
    return picks_SK


def _statistic(key: OwnerKey, measured: Sequence[LayerMeasurement]) -> float:
    path = key.watermarks[0].path
    return math.fsum(float(np.asarray(m.diff_E)[e]) for m in measured for e in path[m.layer])


def _null(measured: Sequence[LayerMeasurement], width: int) -> NullDistribution:
    return NullDistribution([(np.asarray(m.diff_E)[list(m.pool)], width) for m in measured])


def _read(name: str, tried: int, p: PValue, anchor: Anchor) -> Forgery:
    return Forgery(name, tried, p, anchor.p(p), anchor.charge_bits, SIGNIFICANCE, anchor.reason)
