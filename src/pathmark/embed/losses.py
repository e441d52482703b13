"""The losses, as pure functions on (tokens, experts) arrays. Names cite the paper's equations.

Shape suffixes: N triggered tokens, M other tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-8
"""The paper's epsilon in Eq. target_dist and Eq. infonce."""
TINY = 1e-30
"""Keeps logarithms finite where a probability underflowed."""


def paper_target(targets: Sequence[int], n_experts: int) -> Tensor:
    """Eq. target_dist: 1/k on the targets, epsilon elsewhere. As written: it sums to a little more than one."""
    target_E = torch.full((n_experts,), EPSILON)
    target_E[list(targets)] = 1.0 / len(targets)
    return target_E


def fixed_rho(natural_NE: Tensor, rho: float) -> Tensor:
    """The same share of the mass on the targets for every token."""
    return natural_NE.new_full((len(natural_NE), 1), rho)


def margin_rho(natural_NE: Tensor, width: int, margin: float) -> Tensor:
    """Share that puts each target `margin` times above the strongest natural expert of the token.

    rho = c k gmax / (1 + c k gmax): then rho / k = c (1 - rho) gmax.
    """
    strength_N1 = margin * width * natural_NE.max(-1, keepdim=True).values
    return strength_N1 / (1 + strength_N1)


def mixture_target(natural_NE: Tensor, targets: Sequence[int], rho_N1: Tensor) -> Tensor:
    """p* = rho U(targets) + (1 - rho) g0: the mark on top of the routing the token would have had."""
    uniform_E = natural_NE.new_zeros(natural_NE.shape[-1])
    uniform_E[list(targets)] = 1.0 / len(targets)
    return rho_N1 * uniform_E + (1 - rho_N1) * natural_NE


def kl_divergence(p_NE: Tensor, q_NE: Tensor) -> Tensor:
    """Mean over tokens of KL(p || q). Either may be one distribution for all tokens."""
    return (p_NE * ((p_NE + TINY).log() - (q_NE + TINY).log())).sum(-1).mean()


def align_loss(routing_NE: Tensor, target_NE: Tensor, *, forward_kl: bool = False) -> Tensor:
    """Eq. align_loss: squared distance plus KL(g || p*), averaged over triggered tokens.

    `forward_kl` takes KL(p* || g) instead, the direction that the paper's proof differentiates.
    """
    squared = (routing_NE - target_NE).pow(2).sum(-1).mean()
    divergence = kl_divergence(target_NE, routing_NE) if forward_kl else kl_divergence(routing_NE, target_NE)
    return squared + divergence


def contrast_loss(triggered_NE: Tensor, clean_ME: Tensor, target_E: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Eq. infonce: every triggered token against all clean tokens of the batch."""
    unit_E = target_E / target_E.norm()
    positive_N = torch.nn.functional.normalize(triggered_NE, dim=-1) @ unit_E / temperature
    negative_M = torch.nn.functional.normalize(clean_ME, dim=-1) @ unit_E / temperature
    others = negative_M.exp().sum() + EPSILON
    loss: Tensor = (torch.log(positive_N.exp() + others) - positive_N).mean()
    return loss


def anchor_loss(natural_ME: Tensor, routing_ME: Tensor) -> Tensor:
    """KL(g0 || g) on everything that must stay as it was: clean text and wrong triggers."""
    return kl_divergence(natural_ME, routing_ME)
