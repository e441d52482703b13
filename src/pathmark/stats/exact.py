"""The exact key-randomisation test: does the model know the secret path?

For each layer, d[e] is what the trigger does to expert e: its mean routing mass (or how often it is
selected) on triggered probes minus the same on the same texts without trigger. The statistic T is the sum
of d over the target experts of all layers. If the model knows nothing of the secret, the targets are, for
that model, independent uniform k-subsets of the pools, whatever its routing looks like: p is the share of
all paths whose T' is at least T. Nothing is assumed about tokens, texts or popularity.

Erasures. Experts of the owner's model that have no match in the suspect's are known before the secret is
used, because the matching is blind to the targets. How many targets of a layer are among the lost ones is
then ancillary: given that m of them are left, they are a uniform m-subset of what is left of the pool. The
test conditions on m. A layer without any target left has one path, adds nothing, and is an erasure; the
floor is one over the number of paths that remain.

Several watermarks. Watermark j is tested given the targets of watermarks 1..j-1, i.e. in what they left of
each pool, and Fisher's method combines them.

Shape suffix: E experts of one layer, in the owner's numbering.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pathmark.errors import VerificationError
from pathmark.stats.combine import fisher
from pathmark.stats.null import Method, NullDistribution
from pathmark.stats.pvalue import SMALLEST_FLOAT, PValue


@dataclass(frozen=True, eq=False)
class LayerEvidence:
    """What was measured in one layer, and where the key says the mark is."""

    layer: int
    """Number of the layer in the owner's model."""
    diff_E: NDArray[np.generic]
    """Triggered minus clean, per expert. Integers (differences of selection counts) are tested exactly."""
    pool: Sequence[int]
    """Experts that the key admits as targets in this layer."""
    targets: Sequence[int]
    """The key's target experts, a subset of the pool."""
    matched_E: NDArray[np.bool_] | None = None
    """Which experts have a counterpart in the suspect model; None: all. Must not depend on the targets."""

    def __post_init__(self) -> None:
        diff_E, where = np.asarray(self.diff_E), f"layer {self.layer}"
        if diff_E.ndim != 1 or diff_E.dtype.kind not in "iuf":
            raise VerificationError(f"{where}: diff_E must be a vector of numbers, got {diff_E.dtype}{diff_E.shape}")
        if not np.isfinite(diff_E).all():
            raise VerificationError(f"{where}: diff_E holds nan or inf; give unmatched experts 0 and a mask")
        pool = set(self.pool)
        if len(pool) != len(self.pool) or not pool <= set(range(len(diff_E))):
            raise VerificationError(f"{where}: the pool must name distinct experts below {len(diff_E)}")
        if len(set(self.targets)) != len(self.targets) or not self.targets or not set(self.targets) <= pool:
            raise VerificationError(f"{where}: targets must be distinct experts of the pool, at least one")
        if self.matched_E is not None and (self.matched_E.shape != diff_E.shape or self.matched_E.dtype != np.bool_):
            raise VerificationError(f"{where}: matched_E must be a boolean per expert, as many as diff_E has")

    @property
    def live_pool(self) -> tuple[int, ...]:
        """Pool experts that still exist in the suspect model."""
        return self._live(self.pool)

    @property
    def live_targets(self) -> tuple[int, ...]:
        """Target experts that still exist in the suspect model."""
        return self._live(self.targets)

    def _live(self, experts: Sequence[int]) -> tuple[int, ...]:
        return tuple(e for e in experts if self.matched_E is None or self.matched_E[e])


@dataclass(frozen=True, eq=False)
class LayerMeasurement:
    """One layer as measured, before anybody says where the mark is."""

    layer: int
    diff_E: NDArray[np.generic]
    pool: Sequence[int]
    matched_E: NDArray[np.bool_] | None = None

    def aim(self, targets: Sequence[int]) -> LayerEvidence:
        """The evidence for a given set of targets."""
        return LayerEvidence(self.layer, self.diff_E, self.pool, targets, self.matched_E)


@dataclass(frozen=True)
class ExactResult:
    """Outcome of the exact test for one watermark."""

    statistic: float
    p: PValue
    """Probability that a random path does at least as well; never too small."""
    lower: PValue
    """Certified lower bound: the truth lies in [lower, p]. Equal to p where the count is exact."""
    floor: PValue
    """The smallest p that this evidence could have reached: one over `n_paths`."""
    n_paths: int
    """Paths left after erasures."""
    paths_reaching: int | None
    """How many of them do at least as well, where that is known exactly."""
    erased_layers: tuple[int, ...]
    """Layers without a surviving target; they add nothing."""
    method: Method

    @property
    def p_value(self) -> float:
        """`p` as a float."""
        if self.paths_reaching is not None:
            return max(self.paths_reaching / self.n_paths, SMALLEST_FLOAT)
        return self.p.value

    @property
    def log10_p(self) -> float:
        """`p` as a logarithm, which no number of layers can make underflow."""
        return self.p.log10

    def __str__(self) -> str:
        erased = f", layers {', '.join(map(str, self.erased_layers))} erased" if self.erased_layers else ""
        return f"T = {self.statistic:.4g}, p = {self.p} (floor {self.floor}{erased})"


@dataclass(frozen=True)
class CombinedResult:
    """Outcome for several watermarks of one key."""

    results: tuple[ExactResult, ...]
    """One per watermark, each conditional on the ones before it."""
    p: PValue
    """Fisher's combination."""
    floor: PValue
    """The combination of the floors."""


def null_distribution(layers: Sequence[LayerEvidence]) -> NullDistribution:
    """The null for these layers, pools, matches and numbers of surviving targets; reusable across keys."""
    _check_layers(layers)
    return NullDistribution(
        [
            (np.asarray(layer.diff_E)[list(layer.live_pool)], len(layer.live_targets))
            for layer in layers
            if layer.live_targets
        ]
    )


def path_statistic(layers: Sequence[LayerEvidence]) -> float:
    """T: the sum of d over the surviving targets of all layers."""
    return math.fsum(float(np.asarray(layer.diff_E)[e]) for layer in layers for e in layer.live_targets)


def exact_test(layers: Sequence[LayerEvidence], null: NullDistribution | None = None) -> ExactResult:
    """Test one watermark. `null` may be passed if `null_distribution` gave it for the same measurements."""
    null = null_distribution(layers) if null is None else null
    statistic = path_statistic(layers)
    tail = null.tail(statistic)
    return ExactResult(
        statistic=statistic,
        p=tail.p,
        lower=tail.lower,
        floor=null.floor,
        n_paths=null.n_paths,
        paths_reaching=tail.paths_reaching,
        erased_layers=tuple(layer.layer for layer in layers if not layer.live_targets),
        method=tail.method,
    )


def exact_test_many(watermarks: Sequence[Sequence[LayerEvidence]]) -> CombinedResult:
    """Test several watermarks of one key, in the key's order; they may use different layers.

    In a shared layer the targets must be disjoint, as the key derives them: one keyed permutation per layer.
    Pools there are the same, or disjoint where blocks have been disclosed. The order matters a little for
    each p, not for the validity of the combination.
    """
    if not watermarks:
        raise VerificationError("expected at least one watermark, got none")
    pools: dict[int, set[frozenset[int]]] = {}
    taken: dict[int, set[int]] = {}
    results = []
    for number, layers in enumerate(watermarks):
        left = []
        for layer in layers:
            used = taken.setdefault(layer.layer, set())
            known = pools.setdefault(layer.layer, set())
            known.add(frozenset(layer.pool))
            if sum(map(len, known)) != len(frozenset().union(*known)):
                raise VerificationError(
                    f"layer {layer.layer}: the pool of watermark {number} overlaps an earlier one without "
                    "being the same; pass the pool that the key records, or the disclosed blocks"
                )
            if used & set(layer.targets):
                raise VerificationError(f"layer {layer.layer}: watermark {number} shares targets with an earlier one")
            pool = [e for e in layer.pool if e not in used]
            left.append(LayerEvidence(layer.layer, layer.diff_E, pool, layer.targets, layer.matched_E))
        results.append(exact_test(left))
        for layer in layers:
            taken[layer.layer].update(layer.targets)
    return CombinedResult(tuple(results), fisher([r.p for r in results]), fisher([r.floor for r in results]))


def _check_layers(layers: Sequence[LayerEvidence]) -> None:
    numbers = [layer.layer for layer in layers]
    if not numbers or len(set(numbers)) != len(numbers):
        raise VerificationError(f"expected distinct layers, at least one, got {numbers}")
