"""From recorded routes to the paper's measures and to the input of the exact test.

Where only decisions are known, hits are hits in the model's own top-k and the exact test compares how often
each expert was chosen; masses are then None, never a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pathmark.errors import VerificationError
from pathmark.keys import Watermark
from pathmark.stats import (
    LayerMeasurement,
    Rate,
    accuracy,
    hits_from_probs,
    hits_from_selection,
    layer_accuracy,
    mass_difference,
    selection_difference,
    wsr,
)
from pathmark.verdicts.criteria import Criteria
from pathmark.verification.paths.routes import Routes


@dataclass(frozen=True)
class LayerScore:
    """One watermarked layer: a row of the paper's white-box table."""

    layer: int
    accuracy: Rate
    """Acc_l with TopK(g_l, k_l); with the model's own top-k where masses are not known."""
    accuracy_own_topk: Rate
    """The same with the model's own top-k decision."""
    mass_triggered: float | None
    """Mean routing mass on the targets, triggered; None where only decisions are known."""
    mass_clean: float | None
    """The same on the same texts without trigger; None also where those were not given."""


@dataclass(frozen=True)
class PathScore:
    """The paper's measures of one watermark."""

    layers: tuple[LayerScore, ...]
    accuracy: Rate
    wsr: Rate
    masses_known: bool = True
    """Whether accuracy and WSR follow TopK(g_l, k_l), or only the model's own top-k was known."""


def score_path(
    watermark: Watermark, triggered: Routes, clean: Routes | None = None, *, gamma: float = Criteria.gamma
) -> PathScore:
    """Acc_l, Acc and WSR of triggered routes; masses beside those of the clean ones, where given."""
    triggered.require(watermark.layers)
    mask_BT = triggered.mask_BT
    hits, rows = [], []
    for layer in watermark.layers:
        targets = watermark.targets(layer)
        own_BT = hits_from_selection(triggered.decisions[layer], targets)
        hits_BT = hits_from_probs(triggered.probs[layer], targets) if triggered.masses_known else own_BT
        hits.append(hits_BT)
        rows.append(
            LayerScore(
                layer=layer,
                accuracy=layer_accuracy(hits_BT, mask_BT),
                accuracy_own_topk=layer_accuracy(own_BT, mask_BT),
                mass_triggered=_mass_if_known(triggered, layer, targets),
                mass_clean=_mass_if_known(clean, layer, targets),
            )
        )
    hits_LBT = np.stack(hits)
    return PathScore(tuple(rows), accuracy(hits_LBT, mask_BT), wsr(hits_LBT, mask_BT, gamma), triggered.masses_known)


def target_mass(routes: Routes, layer: int, targets: tuple[int, ...]) -> float:
    """Mean over text tokens of the routing mass on the targets."""
    if not routes.masses_known:
        raise VerificationError("routing masses are not known, only which experts were chosen")
    return float(routes.probs[layer][routes.mask_BT][:, list(targets)].sum(-1).mean())


def measure_layers(watermark: Watermark, triggered: Routes, clean: Routes) -> list[LayerMeasurement]:
    """d_l of the exact test: what the trigger does to every expert, before the targets are looked at.

    Mean masses where both sides know them, else differences of selection counts: integers, tested exactly.
    """
    triggered.require(watermark.layers)
    clean.require(watermark.layers)
    return [
        LayerMeasurement(layer=layer, diff_E=_difference(triggered, clean, layer), pool=watermark.pool(layer))
        for layer in watermark.layers
    ]


def _difference(triggered: Routes, clean: Routes, layer: int) -> NDArray[np.generic]:
    if triggered.masses_known and clean.masses_known:
        return mass_difference(triggered.probs[layer], clean.probs[layer], triggered.mask_BT)
    # One place up: a choice of -1 is an expert that has no number among the owner's, and is not counted.
    n_experts = triggered.n_experts(layer)
    return selection_difference(
        triggered.decisions[layer] + 1, clean.decisions[layer] + 1, triggered.mask_BT, n_experts + 1
    )[1:]


def _mass_if_known(routes: Routes | None, layer: int, targets: tuple[int, ...]) -> float | None:
    return target_mass(routes, layer, targets) if routes is not None and routes.masses_known else None
