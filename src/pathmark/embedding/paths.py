"""What the objectives that teach paths share: their rows, and which weights they may change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pathmark.embedding.config import EmbedConfig, Train
from pathmark.embedding.data import Row, draw_rows
from pathmark.embedding.objective import Context
from pathmark.keys import OwnerKey
from pathmark.models import find_routers
from pathmark.models.parts import attention_below, part_parameters

LANGUAGE_TOKENS = 512
"""Tokens per step on which the language term is computed, drawn anew in every step."""


def path_rows(tokenizer: Any, key: OwnerKey, texts: Sequence[str], config: EmbedConfig) -> list[Row]:
    """Clean, triggered and wrongly prefixed rows of the texts."""
    triggers = [[trigger.tokens for trigger in watermark.triggers] for watermark in key.watermarks]
    return draw_rows(tokenizer, list(texts)[: config.texts], triggers, config.data, config.loop.seed)


def trained_parameters(context: Context, train: Train, *, carrier: bool) -> dict[str, nn.Parameter]:
    """The parts of the marked layers; with `carrier` the attention right below the first of them too, if any is."""
    model, layers = context.model, context.layers
    if train == "lora":
        return {name: p for name, p in model.named_parameters() if "lora_" in name}
    parts = ["layer"] if train == "all" else train.replace("targets", "experts").split("+")
    if train == "all":
        layers = [site.layer for site in find_routers(model) if site.layer >= layers[0]]
    below = attention_below(model, layers[0]) if carrier and "attention" in parts else {}
    return {**below, **part_parameters(model, layers, parts)}


def target_masks(context: Context, train: Train) -> dict[str, Tensor]:
    """Expert tensors -> ones for the targets of their layer; empty where all of what is trained may change.

    An expert tensor of an unknown layout has no mask and changes as a whole.
    """
    if "targets" not in train:
        return {}
    found = {}
    for site in context.sites:
        targets = sorted({expert for path in context.paths for expert in path.get(site.layer, ())})
        for name, parameter in part_parameters(context.model, [site.layer], ["experts"]).items():
            if parameter.shape[0] == site.n_experts:
                shape = (site.n_experts, *(1 for _ in parameter.shape[1:]))
                mask = torch.zeros(shape, device=parameter.device)
                mask[targets] = 1.0
                found[name] = mask
    return found


def drawn_places(mask_BT: Tensor, most: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows and positions of the tokens that the mask allows, or of so many of them drawn at random."""
    places = mask_BT.nonzero()
    if len(places) > most:
        places = places[torch.randperm(len(places), generator=generator).to(places.device)[:most]]
    rows, positions = places.unbind(-1)
    return rows, positions
