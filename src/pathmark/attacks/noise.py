"""Random noise: once on the weights, or afresh on the router logits of every forward pass.

The adversary of both holds the weights and knows the architecture; it has no text, no key and no other model.

Shape suffixes: E experts, H hidden size, N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.attacks.blocks import copied, moe_blocks
from pathmark.attacks.kit import Kit
from pathmark.errors import AttackError
from pathmark.models import RouterSite, select_sites


@dataclass(frozen=True, kw_only=True)
class WeightNoise:
    """Gaussian noise on every weight matrix."""

    scale: float = 0.1
    """Standard deviation of the noise, as a multiple of the matrix's own."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scale must be above 0, got {self.scale}")


@dataclass(frozen=True, kw_only=True)
class RouterNoise:
    """Gaussian noise on router logits while the model runs."""

    sigma: float = 1.0
    """Standard deviation of the noise, in logits."""
    seed: int = 0

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
    takes all. Logits are z = W h, so W^+ eps is added to the router's input: W (h + W^+ eps) = z + eps exactly
    where the rows of W are independent, and whoever reads the router's input sees the noise too. Experts get the
    input without noise. What comes back is a model with hooks in it: a wrapper at inference, which can't be
    saved, and the last step of a chain, because the hooks know today's router weights.
    """
    model = copied(model)
    sites = [block.site for block in moe_blocks(model)]
    sites = select_sites(sites, kit.layers) if kit.layers else sites
    kit.progress.stage("router noise", len(sites))
    for site in sites:
        noise = _LogitNoise(site, config.sigma, config.seed * 100_003 + site.layer)
        site.projection.register_forward_pre_hook(noise, with_kwargs=True)
        kit.progress.advance(1)
    model.save_pretrained = _refuse_to_save
    return model


class _LogitNoise:
    """Moves the input of a router so that its logits move by noise."""

    def __init__(self, site: RouterSite, sigma: float, seed: int) -> None:
        weight_EH = site.weight.double()
        experts, hidden = weight_EH.shape
        rank = int(torch.linalg.matrix_rank(weight_EH))
        if rank < experts:
            raise AttackError(
                f"layer {site.layer}: expected {experts} independent router rows of {hidden} entries, got rank {rank}; "
                "noise on its logits cannot be made from its input"
            )
        # further rows, where there are any, are no routed experts and keep their logits
        self.inverse_HE = torch.linalg.pinv(weight_EH)[:, : site.n_experts].float()
        self.sigma = sigma
        self.source = torch.Generator().manual_seed(seed)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self.moved(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.moved(kwargs["hidden_states"])}

    def moved(self, hidden: Tensor) -> Tensor:
        """The input whose logits are noisy; any leading shape."""
        shape = (*hidden.shape[:-1], self.inverse_HE.shape[1])
        eps = self.sigma * torch.randn(shape, generator=self.source).to(hidden.device)
        step = torch.nn.functional.linear(eps, self.inverse_HE.to(hidden.device))
        return (hidden.float() + step).to(hidden.dtype)


def _refuse_to_save(*args: object, **kwargs: object) -> None:
    raise AttackError("router noise is added while the model runs and can't be saved; apply it again after loading")
