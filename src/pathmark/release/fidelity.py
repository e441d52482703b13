"""What a model does on held-out texts, clean and triggered; and how far a marked one is from its original."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from pathmark.keys import OwnerKey
from pathmark.models import Perplexity, perplexity
from pathmark.progress import Progress
from pathmark.verification import Routes, record_routes


@dataclass(frozen=True)
class Measurement:
    """One model on one set of probes. `triggered[j]` belongs to watermark j."""

    clean: Routes
    triggered: tuple[Routes, ...]
    clean_ppl: Perplexity
    triggered_ppl: tuple[Perplexity, ...]


def measure(
    model: nn.Module,
    key: OwnerKey,
    probes: Sequence[Sequence[int]],
    *,
    progress: Progress | None = None,
) -> Measurement:
    """Routing in the watermarked layers and perplexity of the same text tokens, clean and triggered."""
    layers = list(key.layers)
    clean = record_routes(model, probes, layers, progress=progress)
    clean_ppl = perplexity(model, probes)
    triggered, triggered_ppl = [], []
    for watermark in key.watermarks:
        trigger = watermark.triggers[0].tokens
        triggered.append(record_routes(model, probes, layers, prefix=trigger, progress=progress))
        triggered_ppl.append(perplexity(model, [(*trigger, *text) for text in probes], skip=len(trigger)))
    return Measurement(clean, tuple(triggered), clean_ppl, tuple(triggered_ppl))


def mean_mass(routes: Routes, layer: int) -> tuple[float, ...]:
    """Routing mass of each expert of a layer, averaged over all text tokens."""
    return tuple(float(mass) for mass in routes.probs[layer][routes.mask_BT].mean(axis=0, dtype=np.float64))


@dataclass(frozen=True)
class Drift:
    """How far clean routing has moved from the original's, over all watermarked layers."""

    kl: float
    """Mean KL(g0 || gw) per token."""
    topk_agreement: float
    """Share of the original's chosen experts that are still chosen."""
    mean_l2: float
    """B of the stealth theorem: mean ||gw - g0||_2."""
    mean_squared: float
    """E ||gw - g0||^2, which the corrected bound needs."""
    min_topk_mass: float
    """p_min of the stealth theorem: 1st percentile of the smallest chosen expert's mass."""


def drift(before: Routes, after: Routes) -> Drift:
    """Compare clean routes of the original and of the marked model."""
    keep_BT = before.mask_BT
    kls, agreements, norms, minima = [], [], [], []
    for layer, probs_BTE in before.probs.items():
        g0_NE = probs_BTE[keep_BT].astype(np.float64)
        gw_NE = after.probs[layer][keep_BT].astype(np.float64)
        kls.append((g0_NE * (np.log(g0_NE + 1e-30) - np.log(gw_NE + 1e-30))).sum(-1))
        norms.append(np.linalg.norm(gw_NE - g0_NE, axis=-1))
        d0_NK, dw_NK = before.decisions[layer][keep_BT], after.decisions[layer][keep_BT]
        agreements.append((d0_NK[:, :, None] == dw_NK[:, None, :]).any(-1).mean(-1))
        minima.append(np.take_along_axis(g0_NE, np.maximum(d0_NK, 0), axis=-1).min(-1))
    norms_N = np.concatenate(norms)
    return Drift(
        kl=float(np.concatenate(kls).mean()),
        topk_agreement=float(np.concatenate(agreements).mean()),
        mean_l2=float(norms_N.mean()),
        mean_squared=float((norms_N**2).mean()),
        min_topk_mass=float(np.percentile(np.concatenate(minima), 1)),
    )
