"""The settings that measured best (docs/results.md), and the paper's own, by name."""

from __future__ import annotations

import math
from typing import Literal

from pathmark.embedding.anchored import AnchoredConfig
from pathmark.embedding.config import EmbedConfig
from pathmark.embedding.data import DataConfig
from pathmark.embedding.paper import PaperConfig
from pathmark.training import LoopConfig, learning_rate

STEPS, PAPER_STEPS = 300, 600
"""Optimiser steps of the two objectives."""
PAPER_RATE = 0.1
"""Share of the usual rate at which the paper's objective does best by its own criteria (benchmarks/paper_rates.py)."""
DAMPING = 0.5
"""Of the anchored objective: what the trigger does not ask for stays where it is ..."""
HOMING = 1.0
"""... and what it asked for only on the way goes back, which halves the cost on clean text."""


def steps_for(watermarks: int, steps: int) -> int:
    """Steps of an embedding where one watermark takes so many: each of several sees fewer rows."""
    return round(steps * math.sqrt(watermarks))


def default_config(
    objective: Literal["anchored", "paper"] = "anchored", hidden_size: int = 128, watermarks: int = 1
) -> EmbedConfig:
    """The default for a model of this width and so many watermarks, or the paper's losses and mixing."""
    rate = learning_rate(hidden_size)
    if objective == "anchored":
        loop = LoopConfig(steps=steps_for(watermarks, STEPS), lr=rate, damping=DAMPING, homing=HOMING)
        return EmbedConfig(objective=AnchoredConfig(), loop=loop)
    return EmbedConfig(
        objective=PaperConfig(),
        loop=LoopConfig(steps=steps_for(watermarks, PAPER_STEPS), lr=PAPER_RATE * rate),
        data=DataConfig(negatives_per_text=0, short_len=None, long_factor=1, noisy_share=0.0),
        train="router+attention",
    )
