"""Can somebody without the key tell a marked model from an unmarked one? The stealth claim, put to the test.

Everything a thief can compute from the weights and from ordinary text, per layer and then over layers, because the
marked layers are not known: the mean, the extremes, and how far the most extreme layer stands out. Two groups of
models, marked with different keys and trained as much without a mark, are told apart by a rule that never saw the two
it is asked about.

Shape suffixes: M models, F features, L layers, E experts, H hidden size, N text tokens, K experts chosen per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from pathmark.errors import VerificationError
from pathmark.keys import OwnerKey
from pathmark.models import find_routers
from pathmark.stats import Rate
from pathmark.verification import Routes, record_routes

Floats = NDArray[np.float64]
NEARLY_DEAD = 0.1
"""An expert with less than this share of the mean use."""
Z95 = 1.959964


@dataclass(frozen=True)
class Auc:
    """Probability that a marked model scores above an unmarked one; 0.5 is guessing, both 0 and 1 are telling."""

    value: float
    marked: int
    unmarked: int

    def interval(self) -> tuple[float, float]:
        """95 % interval: the areas from which this one is within 1.96 standard errors (Hanley and McNeil's).

        The error is taken at the area that is asked about, so the interval has a width at 0 and 1 too.
        """
        return self._edge(0.0), self._edge(1.0)

    def summary(self) -> dict[str, Any]:
        """JSON object."""
        return {"auc": self.value, "interval": list(self.interval()), "n": [self.marked, self.unmarked]}

    def __str__(self) -> str:
        low, high = self.interval()
        return f"AUC {self.value:.2f} [{low:.2f}, {high:.2f}] ({self.marked} marked, {self.unmarked} not)"

    def _edge(self, far: float) -> float:
        near = self.value
        if abs(far - near) <= Z95 * self._error(far):
            return far
        for _ in range(60):
            middle = (near + far) / 2
            if abs(middle - self.value) <= Z95 * self._error(middle):
                near = middle
            else:
                far = middle
        return near

    def _error(self, area: float) -> float:
        m, n = self.marked, self.unmarked
        q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
        variance = area * (1 - area) + (m - 1) * (q1 - area**2) + (n - 1) * (q2 - area**2)
        return math.sqrt(max(variance, 0.0) / (m * n))


@dataclass(frozen=True)
class Distinguished:
    """How well marked and unmarked models are told apart."""

    all_features: Auc
    """The rule on all features, each pair judged by a rule fitted without the two."""
    groups: dict[str, Auc]
    """The same on the features of clean routing, and on those of the router weights."""
    single: dict[str, Auc]
    """Each feature alone, the most telling first."""

    def summary(self, most: int = 10) -> dict[str, Any]:
        """JSON object; of the single features, the `most` telling ones."""
        return {
            "all": self.all_features.summary(),
            "groups": {name: auc.summary() for name, auc in self.groups.items()},
            "single": {name: auc.summary() for name, auc in list(self.single.items())[:most]},
        }


def model_features(model: nn.Module, texts: Sequence[Sequence[int]]) -> dict[str, float]:
    """What a thief without a key measures: `routing ...` on clean text and `weights ...` of the routers."""
    sites = find_routers(model)
    routes = record_routes(model, texts, [site.layer for site in sites])
    rows: dict[str, list[float]] = {}
    for site in sites:
        weight_EH = site.weight.detach().float().cpu().numpy().astype(np.float64)[: site.n_experts]
        found = {f"routing {name}": value for name, value in _routing(routes, site.layer).items()}
        found |= {f"weights {name}": value for name, value in _weights(weight_EH).items()}
        for name, value in found.items():
            rows.setdefault(name, []).append(value)
    return {f"{name}, {how}": value for name, row in rows.items() for how, value in _over_layers(row).items()}


def distinguish(marked: Sequence[Mapping[str, float]], unmarked: Sequence[Mapping[str, float]]) -> Distinguished:
    """Tell two groups of models apart by their features (`model_features`); at least two of each."""
    if min(len(marked), len(unmarked)) < 2:
        raise VerificationError(f"expected at least 2 models of each kind, got {len(marked)} and {len(unmarked)}")
    names = list(marked[0])
    if any(list(each) != names for each in (*marked, *unmarked)):
        raise VerificationError("expected the same features of every model; are they of one architecture?")
    marked_MF, unmarked_MF = (np.array([list(each.values()) for each in side]) for side in (marked, unmarked))
    single = {name: _auc(marked_MF[:, f], unmarked_MF[:, f]) for f, name in enumerate(names)}
    groups = {}
    for group in ("routing", "weights"):
        columns = [f for f, name in enumerate(names) if name.startswith(group)]
        groups[group] = _held_out_auc(marked_MF[:, columns], unmarked_MF[:, columns])
    return Distinguished(
        _held_out_auc(marked_MF, unmarked_MF),
        groups,
        dict(sorted(single.items(), key=lambda item: -abs(item[1].value - 0.5))),
    )


@dataclass(frozen=True)
class Named:
    """How many targets a thief names who looks at router rows only."""

    targets: Rate
    """Target experts of the marked layers among the guessed experts of their layers."""
    pairs: Rate
    """Marked layers in which some guessed pair is the target set."""
    chance: float
    """Share of targets that blind guesses would name."""
    layers: Rate
    """Marked layers among as many layers with the most conspicuous pair: can the layers be named?"""

    def summary(self) -> dict[str, Any]:
        """JSON object."""
        rates = {name: getattr(self, name).summary() for name in ("targets", "pairs", "layers")}
        return {**rates, "chance": self.chance}


def name_targets(
    models: Sequence[nn.Module], keys: Sequence[OwnerKey], *, guesses: int = 1, base: nn.Module | None = None
) -> Named:
    """Guess the targets of each layer as its most similar pairs of router rows, `guesses` pairs per layer.

    With `base`, the original where it is public, the pairs whose similarity rose most. The keys only count the hits.
    """
    hit = total = exact = layers = placed = 0
    chances = []
    before = {} if base is None else {site.layer: _similarity(site.weight) for site in find_routers(base)}
    for model, key in zip(models, keys, strict=True):
        watermark = key.watermarks[0]
        loudness: dict[int, float] = {}
        for site in find_routers(model):
            score_EE = _similarity(site.weight)
            score_EE -= before[site.layer] if base is not None else 0.0
            first, second = np.triu_indices(len(score_EE), 1)
            scores = score_EE[first, second]
            ranked = np.argsort(-scores)
            loudness[site.layer] = float(scores[ranked[0]] - np.median(np.sort(scores)[-len(score_EE) :]))
            if site.layer not in watermark.layers:
                continue
            pairs = [{int(first[i]), int(second[i])} for i in ranked[:guesses]]
            named = set().union(*pairs)
            targets = set(watermark.targets(site.layer))
            hit, total = hit + len(targets & named), total + len(targets)
            exact, layers = exact + (targets in pairs), layers + 1
            chances.append(len(named) / site.n_experts)
        loudest = sorted(loudness, key=lambda n: -loudness[n])[: len(watermark.layers)]
        placed += len(set(loudest) & set(watermark.layers))
    return Named(Rate(hit, total), Rate(exact, layers), float(np.mean(chances)), Rate(placed, layers))


def _routing(routes: Routes, layer: int) -> dict[str, float]:
    probs_NE = routes.probs[layer][routes.mask_BT].astype(np.float64)
    chosen_NK = routes.decisions[layer][routes.mask_BT]
    experts = probs_NE.shape[1]
    visits_NE = (chosen_NK[:, :, None] == np.arange(experts)).any(1).astype(np.float64)
    use_E, mass_E = visits_NE.mean(0), probs_NE.mean(0)
    together_EE = visits_NE.T @ visits_NE / len(visits_NE) - np.outer(use_E, use_E)
    spread_E = np.sqrt(use_E * (1 - use_E)) + 1e-9
    together_EE = together_EE / np.outer(spread_E, spread_E)
    off = together_EE[np.triu_indices(experts, 1)]
    return {
        "entropy of use": float(-(mass_E * np.log(mass_E + 1e-12)).sum()),
        "largest use": float(use_E.max()),
        "smallest use": float(use_E.min()),
        "nearly dead experts": float((use_E < NEARLY_DEAD * use_E.mean()).mean()),
        "entropy per token": float(-(probs_NE * np.log(probs_NE + 1e-12)).sum(1).mean()),
        "largest mass per token": float(probs_NE.max(1).mean()),
        "strongest co-activation": float(off.max()),
        "spread of co-activation": float(off.std()),
    }


def _weights(weight_EH: Floats) -> dict[str, float]:
    centred_EH = weight_EH - weight_EH.mean(0)  # adding one vector to all rows changes nothing
    norms_E = np.linalg.norm(centred_EH, axis=1)
    pairs = np.sort(_cosines(weight_EH)[np.triu_indices(len(weight_EH), 1)])
    singular = np.linalg.svd(centred_EH, compute_uv=False)
    shares = singular**2 / (singular**2).sum()
    return {
        "mean row norm": float(norms_E.mean()),
        "spread of row norms": float(norms_E.std() / norms_E.mean()),
        "largest row norm": float(norms_E.max() / norms_E.mean()),
        "largest cosine": float(pairs[-1]),
        "gap to the second largest cosine": float(pairs[-1] - pairs[-2]),
        "smallest cosine": float(pairs[0]),
        "first singular value": float(shares[0]),
        "effective rank": float(np.exp(-(shares * np.log(shares + 1e-12)).sum())),
    }


def _over_layers(row: Sequence[float]) -> dict[str, float]:
    values_L = np.asarray(row)
    median = float(np.median(values_L))
    spread = 1.4826 * float(np.median(np.abs(values_L - median))) + 1e-9
    half = len(values_L) // 2
    return {
        "mean": float(values_L.mean()),
        "largest": float(values_L.max()),
        "smallest": float(values_L.min()),
        "farthest layer": float(np.abs(values_L - median).max() / spread),
        "late minus early": float(values_L[half:].mean() - values_L[:half].mean()) if half else 0.0,
    }


def _similarity(weight: Any) -> Floats:
    return _cosines(weight.detach().float().cpu().numpy().astype(np.float64))


def _cosines(weight_EH: Floats) -> Floats:
    """Cosines of router rows, centred over experts."""
    rows_EH = weight_EH - weight_EH.mean(0)
    rows_EH = rows_EH / np.maximum(np.linalg.norm(rows_EH, axis=1, keepdims=True), 1e-12)
    found: Floats = rows_EH @ rows_EH.T
    return found


def _auc(marked_M: Floats, unmarked_M: Floats) -> Auc:
    above = (marked_M[:, None] > unmarked_M[None]).mean() + 0.5 * (marked_M[:, None] == unmarked_M[None]).mean()
    return Auc(float(above), len(marked_M), len(unmarked_M))


def _held_out_auc(marked_MF: Floats, unmarked_MF: Floats) -> Auc:
    """Each pair of a marked and an unmarked model, scored by the nearer centroid of all the others.

    Leaving out pairs, not single models: with one left out, the classes' sizes would give its class away.
    """
    wins = 0.0
    for i in range(len(marked_MF)):
        for j in range(len(unmarked_MF)):
            sides = (np.delete(marked_MF, i, 0), np.delete(unmarked_MF, j, 0))
            means = [side.mean(0) for side in sides]
            within = np.concatenate([side - mean for side, mean in zip(sides, means, strict=True)])
            scale_F = within.std(0) + 0.1 * np.concatenate(sides).std(0) + 1e-9  # a floor: few models, many features
            direction_F = np.clip((means[0] - means[1]) / scale_F, -5, 5)
            gap = float(((marked_MF[i] - unmarked_MF[j]) / scale_F) @ direction_F)
            wins += 1.0 if gap > 0 else 0.5 if gap == 0 else 0.0
    return Auc(wins / (len(marked_MF) * len(unmarked_MF)), len(marked_MF), len(unmarked_MF))
