"""How alike two experts are: by the tokens they serve, by their router rows, by their neurons.

Pure: arrays in, arrays out. Nothing here has seen a trigger or a target.

Shape suffixes: N tokens, E experts (O the owner's, S the suspect's), P projections, C features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]

WEIGHTS = {"tokens": 3.0, "router": 1.0, "neurons": 1.0}
"""How much each part counts in the mean. What an expert does outlasts what it looks like."""
SILENT = 0.5
"""A part whose median best similarity is below this says nothing about the suspect and is left out: router rows
after a rotation, neurons after training, everything on a foreign model."""


@dataclass(frozen=True, eq=False)
class LayerPrint:
    """What is known of the experts of one layer; None where it is not known."""

    tokens_NE: Floats
    """Routing mass of each expert on the profile's tokens, or 1 where it was chosen if masses are not known."""
    router_EP: Floats | None = None
    """Centred router rows, projected."""
    neurons_EC: Floats | None = None
    """Statistics over each expert's neurons."""

    @property
    def n_experts(self) -> int:
        """Experts of the layer."""
        return int(self.tokens_NE.shape[1])


def similarities(owner: LayerPrint, suspect: LayerPrint) -> dict[str, NDArray[np.float64]]:
    """Part -> similarity_OS in (-inf, 1]; only the parts that both sides have and that speak (see SILENT)."""
    parts = {"tokens": correlation(owner.tokens_NE, suspect.tokens_NE)}
    if owner.router_EP is not None and suspect.router_EP is not None:
        parts["router"] = cosine(owner.router_EP, suspect.router_EP)
    if owner.neurons_EC is not None and suspect.neurons_EC is not None and owner.n_experts > 1:
        parts["neurons"] = neighbourliness(owner.neurons_EC, suspect.neurons_EC)
    return {name: part for name, part in parts.items() if np.median(part.max(axis=0)) >= SILENT}


def combined(parts: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Weighted mean of the parts, each cut to [0, 1]."""
    total = sum(WEIGHTS[name] for name in parts)
    return np.asarray(sum(WEIGHTS[name] * np.clip(part, 0, 1) for name, part in parts.items()) / total)


def correlation(owner_NO: Floats, suspect_NS: Floats) -> NDArray[np.float64]:
    """Pearson correlation over tokens of every pair of experts."""
    return cosine((owner_NO - owner_NO.mean(0)).T, (suspect_NS - suspect_NS.mean(0)).T)


def cosine(owner_OC: Floats, suspect_SC: Floats) -> NDArray[np.float64]:
    """Cosine of every pair of rows; 0 for a row of zeros."""
    return np.asarray(_unit(owner_OC) @ _unit(suspect_SC).T)


def neighbourliness(owner_OC: Floats, suspect_SC: Floats) -> NDArray[np.float64]:
    """1 for equal features, 0 for a pair as far apart as the owner's expert is from its nearest own neighbour.

    Each side is standardised over its own experts: training moves all experts' statistics together.
    """
    owner, suspect = _standard(owner_OC), _standard(suspect_SC)
    own_OO = _distance(owner, owner)
    np.fill_diagonal(own_OO, np.inf)
    return np.asarray(1 - _distance(owner, suspect) / np.maximum(own_OO.min(axis=1), 1e-9)[:, None])


def _unit(rows: Floats) -> NDArray[np.float64]:
    rows = np.nan_to_num(np.asarray(rows, dtype=np.float64))
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(np.divide(rows, length, out=np.zeros_like(rows), where=length > 1e-12))


def _standard(features: Floats) -> NDArray[np.float64]:
    features = np.nan_to_num(np.asarray(features, dtype=np.float64))
    return np.asarray((features - np.median(features, axis=0)) / np.maximum(features.std(axis=0), 1e-9))


def _distance(a: Floats, b: Floats) -> NDArray[np.float64]:
    squared = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    return np.asarray(np.sqrt(np.maximum(squared, 0)))
