"""Routers learnt anew from what the stolen model says, whatever it routed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pathmark.attacks.attack import option
from pathmark.attacks.finetuning import attack_rate, check_training, optimise, padding_of, prepared
from pathmark.attacks.kit import Kit
from pathmark.errors import AttackError
from pathmark.models import find_routers, select_sites
from pathmark.models.parts import part_parameters
from pathmark.models.upper import output_head
from pathmark.training import LoopConfig, TeacherCache, linear_distillation
from pathmark.training.text import TextBatches


@dataclass(frozen=True, kw_only=True)
class DistillRouters:
    """Train routers alone, towards the stolen model's next-token distribution."""

    reinitialise: bool = option(
        False, "Draw the routers' rows anew first, with the mean and spread that the layer's had."
    )
    layers: Literal["known", "all"] = option(
        "all", "Routers to train: of the watermarked layers, where those are known, or of all."
    )
    samples: int = option(3000, "Different texts.")
    epochs: int = option(10, "Passes over them.")
    lr_factor: float = option(1.0, "Learning rate as a multiple of the one that marks are embedded with.")
    batch_size: int = option(16, "Texts per step.")
    length: int = option(128, "Tokens of a text that are used, at most.")
    seed: int = option(0, "Choice and order of the texts, and the new rows.")

    def __post_init__(self) -> None:
        if self.layers not in ("known", "all"):
            raise ValueError(f"layers must be known or all, got {self.layers!r}")
        check_training(self.samples, self.epochs, self.lr_factor, self.batch_size, self.length)


def distill_routers(model: PreTrainedModel, config: DistillRouters, kit: Kit) -> PreTrainedModel:
    """Train only routers on clean text, KL(stolen model || copy) of the next token, redrawn first where asked.

    The adversary knows that routers carry the mark, and with layers="known" in which layers; needs ordinary text.
    The stolen model is its own teacher, so this costs the language little. Works in float32 and returns float32.
    """
    model = prepared(model)
    layers = _layers(model, config, kit)
    rows = kit.rows(config.samples, config.length, seed=config.seed)
    replay = TeacherCache(model, rows, layers[:1], lowest=layers[0], pad=padding_of(kit), progress=kit.progress)
    if config.reinitialise:
        redraw_routers(model, layers, config.seed)
    batches = TextBatches([len(row) for row in rows], config.batch_size, config.seed)
    head_VH, scale = output_head(model)

    def step_loss(step: int, generator: torch.Generator) -> dict[str, Tensor]:
        batch = replay.batch(batches.at(step))
        keep_BT = batch.mask_BT.bool()
        final_BTH = replay.forward(batch)
        return {"loss": linear_distillation(final_BTH[keep_BT], batch.final_BTH[keep_BT], head_VH, scale=scale)}

    loop = LoopConfig(
        steps=config.epochs * batches.per_epoch, lr=attack_rate(model, config.lr_factor), seed=config.seed
    )
    parameters = part_parameters(model, layers, ["router"])
    optimise(model, parameters, step_loss, loop, kit, stage="routers towards the stolen model")
    return model


@torch.no_grad()
def redraw_routers(model: PreTrainedModel, layers: Sequence[int], seed: int) -> None:
    """Replace the routers' rows, in place, by normal ones of the same mean and standard deviation."""
    for site in select_sites(find_routers(model), layers):
        weight_EH = site.weight
        source = torch.Generator().manual_seed(seed * 100_003 + site.layer)
        drawn_EH = torch.randn(weight_EH.shape, generator=source)
        weight_EH.copy_(weight_EH.mean() + weight_EH.std() * drawn_EH.to(weight_EH))


def _layers(model: PreTrainedModel, config: DistillRouters, kit: Kit) -> list[int]:
    routed = find_routers(model)
    if config.layers == "all":
        return [site.layer for site in routed]
    if not kit.layers:
        raise AttackError("this attack was asked for the watermarked layers; give the key with --key, or take all")
    return sorted(site.layer for site in select_sites(routed, kit.layers))
