"""Read the id out of the routing, without being told which id to look for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pathmark.keys import Watermark
from pathmark.stats import LayerMeasurement


@dataclass(frozen=True)
class DecodedId:
    """The most likely id and how clearly each layer spoke."""

    id: int | None
    """None where the layers' digits belong to no id of the key."""
    digits: tuple[int, ...]
    """Strongest group per layer."""
    confidence: tuple[float, ...]
    """Per layer: lead of the strongest group over the second, as a share of the strongest; 0 is a tie."""


def decode_id(watermark: Watermark, measurements: Sequence[LayerMeasurement]) -> DecodedId:
    """Soft decision per layer: the candidate group whose experts gained most under the trigger."""
    digits, confidence = [], []
    for measurement in measurements:
        gains = np.array(
            [float(np.sum(measurement.diff_E[list(group)])) for group in watermark.groups(measurement.layer)]
        )
        first, *rest = np.argsort(-gains)
        digits.append(int(first))
        second = gains[rest[0]] if rest else 0.0
        confidence.append(float(max(0.0, (gains[first] - second) / max(abs(gains[first]), 1e-12))))
    return DecodedId(watermark.decode_id(digits), tuple(digits), tuple(confidence))
