"""Who leaked it? A small p against "unmarked" is not yet a name.

All copies share one trigger; the id is in the path. Every licensee's path is tested on the same
measurement, so one null distribution serves them all. To name one, three things must hold:

1. its p-value, charged for all licensees compared, is small;
2. it stays small if one of its rivals were the leaker: given the rival's targets, the licensee's targets in
   the layers where both differ are uniform subsets of what is left of the pool;
3. no rival is significant in the same way beside it. If one is, more than one copy has gone into the
   suspect, and both are reported.

Two licensees who compare their copies see every layer in which their paths differ and may choose, layer by
layer, whose version to keep, or neither. Layers in which they agree are invisible to them and point at both.
`collusion` says how much that leaves, and whether a third licensee could be framed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pathmark.errors import VerificationError
from pathmark.stats.combine import Family, bonferroni
from pathmark.stats.exact import LayerMeasurement, exact_test, path_statistic
from pathmark.stats.null import NullDistribution
from pathmark.stats.pvalue import PValue

Decision = Literal["licensee", "several", "ambiguous", "none"]
"""One is named; more than one mark is present; marked, but rivals cannot be told apart; nobody stands out."""

Paths = Mapping[str, Sequence[Sequence[int]]]
"""Licensee -> target experts per measured layer."""


@dataclass(frozen=True)
class TraceResult:
    """The tracing decision and what it rests on. All p-values but those of `ranking` are family-wise."""

    decision: Decision
    best: str
    p: PValue
    """Of the best licensee against "no such mark", charged for the family."""
    rival: str | None
    """The licensee that explains the best one's evidence best; None if there is no other, or no mark."""
    p_against_rival: PValue | None
    """Of the best licensee if the rival's mark were in the model."""
    p_rival_beside_best: PValue | None
    """Smallest p of a rival, given the best licensee's mark."""
    margin: float | None
    """How many powers of ten the best p-value lies below the second best."""
    ranking: tuple[tuple[str, PValue], ...]
    """The strongest licensees with their own p-values, uncharged."""
    family: Family


def trace(
    layers: Sequence[LayerMeasurement],
    paths: Paths,
    *,
    alpha: float = 1e-6,
    family: Family | None = None,
    rivals: int = 5,
) -> TraceResult:
    """Decide which licensee's copy the suspect comes from.

    `family` counts what else was tried (suspects, alignments ...); the licensees in `paths` are added as
    its `ids`. The `rivals` strongest others are held against the best.
    """
    if not paths or not layers:
        raise VerificationError("expected at least one licensee and one measured layer, got none")
    if bad := [name for name, path in paths.items() if len(path) != len(layers)]:
        raise VerificationError(f"expected targets for {len(layers)} layers, {bad[0]!r} has {len(paths[bad[0]])}")
    family = replace(family or Family(), ids=(family.ids if family else 1) * len(paths))
    names = list(paths)
    ranking = tuple((names[i], p) for i, p in _strongest(layers, list(paths.values()), rivals + 1))
    best, p_best = ranking[0]
    p = bonferroni(p_best, family)
    margin = ranking[1][1].log10 - p_best.log10 if len(ranking) > 1 else None
    if p.value > alpha or len(ranking) == 1:
        decision: Decision = "none" if p.value > alpha else "licensee"
        return TraceResult(decision, best, p, None, None, None, margin, ranking, family)
    others = [name for name, _ in ranking[1:]]
    against = {name: _p_given(layers, paths[best], paths[name]) for name in others}
    rival = max(others, key=lambda name: against[name])
    p_against = bonferroni(against[rival], family)
    p_beside = bonferroni(min(_p_given(layers, paths[name], paths[best]) for name in others), family)
    unclear = p_against.value > alpha
    decision = "ambiguous" if unclear else "several" if p_beside.value <= alpha else "licensee"
    return TraceResult(decision, best, p, rival, p_against, p_beside, margin, ranking, family)


def _p_given(
    layers: Sequence[LayerMeasurement], path: Sequence[Sequence[int]], other: Sequence[Sequence[int]]
) -> PValue:
    """p of `path` if `other` is known to be marked: tested where they differ, in what `other` leaves."""
    evidence = []
    for layer, targets, taken in zip(layers, path, other, strict=True):
        if set(targets) == set(taken):
            continue
        if set(targets) & set(taken):
            raise VerificationError(
                f"layer {layer.layer}: two licensees share some targets but not all; groups must be disjoint"
            )
        pool = [e for e in layer.pool if e not in set(taken)]
        evidence.append(replace(layer, pool=pool).aim(targets))
    return exact_test(evidence).p if evidence else PValue(0.0)


def _strongest(
    layers: Sequence[LayerMeasurement], paths: Sequence[Sequence[Sequence[int]]], n: int
) -> list[tuple[int, PValue]]:
    """Rows and p-values of the n strongest paths, strongest first.

    Paths with the same numbers of surviving targets share a null distribution and its tables; the first
    is then computed at full precision, as `exact_test` would.
    """
    statistics_N = np.zeros(len(paths))
    live_NL = np.zeros((len(paths), len(layers)), dtype=np.int64)
    pools = []
    for column, layer in enumerate(layers):
        evidence = [layer.aim(path[column]) for path in paths]
        pools.append(np.asarray(layer.diff_E)[list(evidence[0].live_pool)])
        for row, here in enumerate(evidence):
            live_NL[row, column] = len(here.live_targets)
            statistics_N[row] += path_statistic([here])
    patterns, member_N = np.unique(live_NL, axis=0, return_inverse=True)
    nulls = [NullDistribution([(pool, int(k)) for pool, k in zip(pools, pattern, strict=True)]) for pattern in patterns]
    member_N = member_N.reshape(-1)
    log10_p_N = np.zeros(len(paths))
    for number, null in enumerate(nulls):
        log10_p_N[member_N == number] = null.log10_p(statistics_N[member_N == number])
    top = np.argsort(log10_p_N, kind="stable")[:n]
    ranking = [(int(i), PValue(float(log10_p_N[i]))) for i in top]
    first = ranking[0][0]
    precise = nulls[member_N[first]].tail(float(statistics_N[first])).p
    return [(first, min(precise, ranking[0][1])), *ranking[1:]]


@dataclass(frozen=True)
class Collusion:
    """What two licensees who pool their copies can do."""

    shared_layers: int
    """Layers in which their paths agree: they cannot see them, and both stay marked there."""
    differing_layers: int
    """Layers which they see, and can take from either copy or destroy."""
    framable: tuple[int, ...]
    """Rows of the other licensees whose whole path they could put together."""
    closest_frame: int
    """Most layers of any other licensee that they could put together, shared ones included."""


def collusion(first_L: Sequence[int], second_L: Sequence[int], others_NL: NDArray[np.integer]) -> Collusion:
    """What holders of two paths (group index per layer) could do to the other licensees' paths.

    Assumes that they can only keep what one of their copies has: a path through a group that neither has
    would need the secret permutation.
    """
    a_L, b_L = np.asarray(first_L), np.asarray(second_L)
    others = np.asarray(others_NL)
    if a_L.shape != b_L.shape or a_L.ndim != 1 or others.shape[1:] != a_L.shape:
        raise VerificationError(
            f"expected paths of one length, got {a_L.shape}, {b_L.shape} and {others.shape} (licensee, layer)"
        )
    reachable_NL = (others == a_L) | (others == b_L)
    shared = int((a_L == b_L).sum())
    return Collusion(
        shared_layers=shared,
        differing_layers=len(a_L) - shared,
        framable=tuple(int(i) for i in np.flatnonzero(reachable_NL.all(axis=1))),
        closest_frame=int(reachable_NL.sum(axis=1).max(initial=0)),
    )
