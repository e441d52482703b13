"""From recorded routes to the paper's measures and to the input of the exact test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pathmark.keys import Watermark
from pathmark.stats import (
    LayerMeasurement,
    Rate,
    accuracy,
    hits_from_probs,
    hits_from_selection,
    layer_accuracy,
    mass_difference,
    wsr,
)
from pathmark.verify.routes import Routes


@dataclass(frozen=True)
class LayerScore:
    """One watermarked layer: a row of the paper's white-box table."""

    layer: int
    accuracy: Rate
    """Acc_l with TopK(g_l, k_l)."""
    accuracy_own_topk: Rate
    """The same with the model's own top-k decision."""
    mass_triggered: float
    """Mean routing mass on the targets, triggered."""
    mass_clean: float
    """The same on the same texts without trigger."""


@dataclass(frozen=True)
class PathScore:
    """The paper's measures of one watermark."""

    layers: tuple[LayerScore, ...]
    accuracy: Rate
    wsr: Rate


def score_path(
    watermark: Watermark, triggered: Routes, clean: Routes | None = None, *, gamma: float = 0.8
) -> PathScore:
    """Acc_l, Acc and WSR of triggered routes; masses beside those of the clean ones, where given."""
    mask_BT = triggered.mask_BT
    hits, rows = [], []
    for layer in watermark.layers:
        targets = watermark.targets(layer)
        hits_BT = hits_from_probs(triggered.probs[layer], targets)
        hits.append(hits_BT)
        own_BT = hits_from_selection(triggered.decisions[layer], targets)
        rows.append(
            LayerScore(
                layer=layer,
                accuracy=layer_accuracy(hits_BT, mask_BT),
                accuracy_own_topk=layer_accuracy(own_BT, mask_BT),
                mass_triggered=target_mass(triggered, layer, targets),
                mass_clean=target_mass(clean, layer, targets) if clean is not None else float("nan"),
            )
        )
    hits_LBT = np.stack(hits)
    return PathScore(tuple(rows), accuracy(hits_LBT, mask_BT), wsr(hits_LBT, mask_BT, gamma))


def target_mass(routes: Routes, layer: int, targets: tuple[int, ...]) -> float:
    """Mean over text tokens of the routing mass on the targets."""
    return float(routes.probs[layer][routes.mask_BT][:, list(targets)].sum(-1).mean())


def measure_layers(watermark: Watermark, triggered: Routes, clean: Routes) -> list[LayerMeasurement]:
    """d_l of the exact test: what the trigger does to every expert, before the targets are looked at."""
    return [
        LayerMeasurement(
            layer=layer,
            diff_E=mass_difference(triggered.probs[layer], clean.probs[layer], triggered.mask_BT),
            pool=watermark.pool(layer),
        )
        for layer in watermark.layers
    ]
