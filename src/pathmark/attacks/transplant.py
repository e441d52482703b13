"""The stolen MoE blocks inside another body."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from pathmark.attacks.attack import option
from pathmark.attacks.blocks import MoeBlock, copied, moe_blocks
from pathmark.attacks.kit import Kit
from pathmark.attacks.mixing import matching
from pathmark.errors import AttackError


@dataclass(frozen=True, kw_only=True)
class Transplant:
    """Routers and experts of the stolen model, all else from another one."""

    alpha: float = option(1.0, "How far the blocks move to the stolen ones; 1 takes them over as they are.")
    shared: bool = option(True, "Whether shared experts and their gates go along.")

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha must be in (0, 1], got {self.alpha}")


@torch.no_grad()
def transplant(model: PreTrainedModel, config: Transplant, kit: Kit) -> PreTrainedModel:
    """Put the stolen routers and experts of all layers into a copy of another model; its other weights stay.

    The adversary knows a model with MoE blocks of the same shapes, such as the public original; needs its
    weights, no text. Attention, norms, embeddings and dense layers come from there, and with them whatever of
    the mark sits in the stolen attention is gone.
    """
    result = copied(kit.second_model())
    stolen, host = moe_blocks(model), moe_blocks(result)
    mine, theirs = [b.site.layer for b in stolen], [b.site.layer for b in host]
    if mine != theirs:
        raise AttackError(f"expected a second model with MoE layers {mine}, got {theirs}; take one of the same depth")
    pairs = [
        (target, source)
        for there, here in zip(host, stolen, strict=True)
        for to, of in zip(_parts(there, config.shared), _parts(here, config.shared), strict=True)
        for _, target, source in matching(to, of)
    ]
    kit.progress.stage("transplant", len(pairs))
    for target, source in pairs:
        target.copy_(source if config.alpha == 1 else torch.lerp(target.float(), source.float(), config.alpha))
        kit.progress.advance(1)
    return result


def _parts(block: MoeBlock, shared: bool) -> list[nn.Module]:
    return [block.block] if shared else [block.site.router, block.experts]
