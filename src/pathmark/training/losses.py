"""The losses, as pure functions on (tokens, experts) arrays. Names cite the paper's equations.

Shape suffixes: N triggered tokens, M other tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-8
"""The paper's epsilon in Eq. target_dist and Eq. infonce."""
STEP_WIDTH = 0.2
"""Of the soft step between experts that are chosen and those that are not, in logarithms of their probability."""
TINY = 1e-30
"""Keeps logarithms finite where a probability underflowed."""


def paper_target(targets: Sequence[int], n_experts: int) -> Tensor:
    """Eq. target_dist: 1/k on the targets, epsilon elsewhere. As written: it sums to a little more than one."""
    target_E = torch.full((n_experts,), EPSILON)
    target_E[list(targets)] = 1.0 / len(targets)
    return target_E


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


def kl_per_token(p_NE: Tensor, q_NE: Tensor) -> Tensor:
    """KL(p || q) of each token. Either may be one distribution for all tokens."""
    return (p_NE * ((p_NE + TINY).log() - (q_NE + TINY).log())).sum(-1)


def kl_divergence(p_NE: Tensor, q_NE: Tensor) -> Tensor:
    """Mean KL(p || q) over tokens."""
    return kl_per_token(p_NE, q_NE).mean()


def align_per_token(routing_NE: Tensor, target_NE: Tensor, *, forward_kl: bool = False) -> Tensor:
    """What Eq. align_loss averages over triggered tokens: squared distance plus KL(g || p*).

    `forward_kl` takes KL(p* || g) instead, the direction that the paper's proof differentiates.
    """
    squared_N = (routing_NE - target_NE).pow(2).sum(-1)
    return squared_N + (kl_per_token(target_NE, routing_NE) if forward_kl else kl_per_token(routing_NE, target_NE))


def align_loss(routing_NE: Tensor, target_NE: Tensor, *, forward_kl: bool = False) -> Tensor:
    """Eq. align_loss: the mean of `align_per_token`."""
    return align_per_token(routing_NE, target_NE, forward_kl=forward_kl).mean()


def row_means(values_N: Tensor, here_BT: Tensor) -> Tensor:
    """Mean of the tokens' values in every row that has some; `here_BT` says which tokens they are, in order."""
    counts_B = here_BT.sum(1)
    sums_B = values_N.new_zeros(len(here_BT)).index_add(0, here_BT.nonzero()[:, 0], values_N)
    return (sums_B / counts_B.clamp_min(1))[counts_B > 0]


def power_mean(values: Tensor, power: float) -> Tensor:
    """(mean of x^power)^(1/power) of values >= 0: the higher the power, the more the largest ones count."""
    return (values.pow(power).mean() + TINY).pow(1 / power)


def contrast_loss(triggered_NE: Tensor, clean_ME: Tensor, target_E: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Eq. infonce: every triggered token against all clean tokens of the batch."""
    unit_E = target_E / target_E.norm()
    positive_N = torch.nn.functional.normalize(triggered_NE, dim=-1) @ unit_E / temperature
    negative_M = torch.nn.functional.normalize(clean_ME, dim=-1) @ unit_E / temperature
    others = negative_M.exp().sum() + EPSILON
    loss: Tensor = (torch.log(positive_N.exp() + others) - positive_N).mean()
    return loss


def anchor_loss(natural_ME: Tensor, routing_ME: Tensor) -> Tensor:
    """KL(g0 || g) on everything that must stay as it was: clean text and wrong prefixes."""
    return kl_divergence(natural_ME, routing_ME)


def selection(routing_ME: Tensor, experts: Sequence[int], top_k: int) -> Tensor:
    """How surely each of these experts is among the k strongest of a token: a soft step at the k-th place.

    The step lies halfway, in logarithms, between the last expert chosen and the first one left out.
    """
    logs_ME = (routing_ME + TINY).log()
    edge_M2 = logs_ME.detach().topk(top_k + 1, dim=-1).values[:, -2:]
    return torch.sigmoid((logs_ME[:, list(experts)] - edge_M2.mean(-1, keepdim=True)) / STEP_WIDTH)


def use_loss(natural_ME: Tensor, routing_ME: Tensor, targets: Sequence[int], factor_K: Tensor, top_k: int) -> Tensor:
    """Keeps targets in use on clean text: chosen `factor` times as often as by the original model.

    The difference of the logarithms, squared. That an expert falls just behind the k-th place is hardly seen by
    KL(g0 || g), and makes it the first to be pruned; that it is suddenly everybody's favourite makes it visible.
    """
    wanted_K = factor_K * selection(natural_ME, targets, top_k).mean(0)
    difference_K = (wanted_K + TINY).log() - (selection(routing_ME, targets, top_k).mean(0) + TINY).log()
    return difference_K.pow(2).mean()


def twin_loss(rows_EH: Tensor, targets: Sequence[int], allowed: float) -> Tensor:
    """Keeps the router rows of a layer's targets apart: cosine of the centred rows above `allowed`, squared.

    Rows that both learn the trigger's direction become the most similar pair of their layer, which names the
    targets to anybody who looks, and makes them the first pair that is merged.
    """
    unit_KH = torch.nn.functional.normalize((rows_EH - rows_EH.mean(0))[list(targets)], dim=-1)
    above_KK = torch.relu(unit_KH @ unit_KH.T - allowed).triu(diagonal=1)
    return above_KK.pow(2).sum()
