"""Random noise: once on the weights, or afresh on the router logits of every forward pass.

The adversary of both holds the weights and knows the architecture; it has no text, no key and no other model.

Shape suffixes: E experts, H hidden size, N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pathmark.attacks.attack import option
from pathmark.attacks.blocks import copied, moe_blocks
from pathmark.attacks.kit import Kit
from pathmark.attacks.logits import move_logits, refuse_to_save
from pathmark.models import select_sites


@dataclass(frozen=True, kw_only=True)
class WeightNoise:
    """Gaussian noise on every weight matrix."""

    scale: float = option(0.1, "Standard deviation of the noise, as a multiple of the matrix's own.")
    seed: int = option(0, "Seed of everything that is drawn.")

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scale must be above 0, got {self.scale}")


@dataclass(frozen=True, kw_only=True)
class RouterNoise:
    """Gaussian noise on router logits while the model runs."""

    sigma: float = option(1.0, "Standard deviation of the noise, in logits.")
    seed: int = option(0, "Seed of everything that is drawn.")

    def __post_init__(self) -> None:
        if not self.sigma > 0:
            raise ValueError(f"sigma must be above 0, got {self.sigma}")


@torch.no_grad()
def weight_noise(model: PreTrainedModel, config: WeightNoise, kit: Kit) -> PreTrainedModel:
    """Add Gaussian noise to every matrix: routers, experts, attention, embeddings; not to norms and biases.

    The adversary knows the weights only; needs nothing. Each expert of a fused tensor counts as a matrix of its
    own, so that a small expert gets small noise.
    """
    model = copied(model)
    moe_blocks(model)  # refuses what is not known, as every attack does
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    kit.progress.stage("noise", len(matrices))
    source = torch.Generator().manual_seed(config.seed)
    for weight in matrices:
        spread = weight.float().std(dim=(-2, -1), keepdim=True)
        noise = torch.randn(weight.shape, generator=source).to(weight.device)
        weight.copy_(weight.float() + config.scale * spread * noise)
        kit.progress.advance(1)
    return model


@torch.no_grad()
def router_noise(model: PreTrainedModel, config: RouterNoise, kit: Kit) -> PreTrainedModel:
    """Add Gaussian noise to the router logits at inference, fresh in every forward pass.

    The adversary serves the model; needs nothing. It may know the watermarked layers (`kit.layers`), otherwise it
    takes all. What comes back is a model with hooks in it: a wrapper at inference, which can't be saved, and the last
    step of a chain, because the hooks know today's router weights.
    """
    model = copied(model)
    sites = [block.site for block in moe_blocks(model)]
    sites = select_sites(sites, kit.layers) if kit.layers else sites
    kit.progress.stage("router noise", len(sites))
    for site in sites:
        source = torch.Generator().manual_seed(config.seed * 100_003 + site.layer)
        move_logits(site, partial(_gaussian, config.sigma, source))
        kit.progress.advance(1)
    refuse_to_save(model, "router noise is added")
    return model


def _gaussian(sigma: float, source: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return sigma * torch.randn(shape, generator=source)
