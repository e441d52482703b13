"""Read the id out of the routing, without being told which id to look for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pathmark.keys import Watermark
from pathmark.stats import LayerMeasurement

UNCLEAR = 0.3
"""A layer whose strongest group leads by less than this share counts as lost: better no id than another's."""


@dataclass(frozen=True)
class DecodedId:
    """The most likely id and how clearly each layer spoke."""

    id: int | None
    """None where the layers' digits belong to no id of the key, or too many layers are lost."""
    digits: tuple[int | None, ...]
    """Strongest group per layer as it went into the id; None for a layer that was lost or given up."""
    confidence: tuple[float, ...]
    """Per layer: lead of the strongest group over the second, as a share of the strongest; 0 is a tie or a loss."""

    @property
    def weakest(self) -> float:
        """Confidence of the least clear layer that took part; 0 where none did."""
        used = [c for digit, c in zip(self.digits, self.confidence, strict=True) if digit is not None]
        return min(used, default=0.0)


def decode_id(watermark: Watermark, measurements: Sequence[LayerMeasurement]) -> DecodedId:
    """Soft decision per layer: the candidate group whose experts gained most under the trigger.

    A layer is lost if no group gained, or none clearly more than the others, as where the targets are gone from the
    suspect. What the key's redundancy leaves is spent on the least clear layers if the digits contradict each other.
    """
    read = [_read_layer(watermark, measurement) for measurement in measurements]
    confidence = tuple(lead for _, lead in read)
    digits = [digit if lead >= UNCLEAR else None for digit, lead in read]
    by_clarity = sorted((i for i, d in enumerate(digits) if d is not None), key=lambda i: confidence[i])
    spare = watermark.redundancy - sum(d is None for d in digits)
    while spare > 0 and by_clarity and watermark.decode_id(digits) is None:
        digits[by_clarity.pop(0)] = None
        spare -= 1
    return DecodedId(watermark.decode_id(digits), tuple(digits), confidence)


def _read_layer(watermark: Watermark, measurement: LayerMeasurement) -> tuple[int | None, float]:
    """(strongest group or None, its lead)."""
    diff_E = np.asarray(measurement.diff_E, dtype=np.float64)
    if measurement.matched_E is not None:
        diff_E = np.where(measurement.matched_E, diff_E, 0.0)
    gains = np.array([float(diff_E[list(group)].sum()) for group in watermark.groups(measurement.layer)])
    first, *rest = np.argsort(-gains, kind="stable")
    if gains[first] <= 0:
        return None, 0.0
    second = max(0.0, float(gains[rest[0]])) if rest else 0.0
    return int(first), float((gains[first] - second) / gains[first])
