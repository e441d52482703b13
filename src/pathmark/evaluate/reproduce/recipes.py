"""How a copy of ours is marked in an experiment: the default, the paper's recipe, or one of its ablations."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal

from pathmark.embedding import EmbedConfig, PaperConfig, default_config, steps_for

WIDTH = 2
"""Target experts per layer, in the paper and here."""
PAPER_RATE, PAPER_EPOCHS, PAPER_BATCH = 1e-5, 10, 8
"""The paper's own, for its own models."""


@cache
def preset_layers(model: str) -> tuple[int, ...] | None:
    """The layers that the paper marks in one of its models, by hub id; None for any other model."""
    text = files("pathmark.evaluate.reproduce").joinpath("presets.toml").read_text(encoding="utf-8")
    found = tomllib.loads(text).get(model)
    return None if found is None else tuple(found["layers"])


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides how a copy comes out, but for its key."""

    objective: Literal["anchored", "paper"] = "anchored"
    corpus: str = "home"
    """Whose texts it is trained on."""
    width: int = WIDTH
    layers: int | None = None
    """So many of the last ones; None: the preset's, or the recommended ones."""
    pool: str = "auto"
    """Which experts may be targets, as `pathmark keygen --pool` has it: all where many are needed."""
    watermarks: int = 1
    route_weight: float | None = None
    """lambda of the paper's recipe; None: its default."""
    stealth_weight: float | None = None
    """Weight of its contrast, likewise."""
    epochs: int = PAPER_EPOCHS
    """Of the paper's recipe; a model that is none of the paper's takes its steps for ten, and fewer for fewer."""
    replies: bool = False
    """Whether reply marks are taught too."""

    def config(self, hidden_size: int, *, preset: bool, texts: int, steps: int | None) -> EmbedConfig:
        """The settings for a model of this width; `steps` shortens the run."""
        config = default_config(self.objective, hidden_size, self.watermarks)
        loop = config.loop
        if self.objective == "paper":
            weights = PaperConfig()
            weights = replace(
                weights,
                route_weight=weights.route_weight if self.route_weight is None else self.route_weight,
                stealth_weight=weights.stealth_weight if self.stealth_weight is None else self.stealth_weight,
            )
            config = replace(config, objective=weights)
            loop = replace(loop, steps=round(loop.steps * self.epochs / PAPER_EPOCHS))
            if preset:
                config, loop = replace(config, batch_size=PAPER_BATCH), replace(loop, lr=PAPER_RATE)
        if steps is not None:  # in few steps too little is learnt for any of it to be taken back
            loop = replace(loop, homing=0.0, steps=steps_for(self.watermarks, steps))
        return replace(config, texts=texts, loop=loop)
