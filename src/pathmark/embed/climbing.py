"""Wrong prefixes made worse by gradient, so that nobody finds a firing one the same way.

A trigger that tolerates wrong tokens adds up evidence token by token, and a gradient search finds prefixes of
strangers' tokens that fire. So part of the wrong prefixes of a step climb first: what enters the first marked layer at
their places is exchanged, place by place, for what other real tokens leave at the same place, as the gradient of the
targets' mass recommends. What they reach is then pressed under a ceiling.

Shape suffixes: R rows, P places of the prefix, T tokens, H hidden size, S states of the bank, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pathmark.embed.losses import TINY

Forward = Callable[[Tensor], Mapping[int, Tensor]]
"""States that enter the first marked layer -> layer -> routing (R, T, E)."""


def target_log_mass(
    routing: Mapping[int, Tensor], paths: Sequence[Mapping[int, Sequence[int]]], owners: Sequence[int]
) -> dict[int, Tensor]:
    """Layer -> (R, T) logarithm of the mass on the targets of each row's own watermark; layers that it marks alone."""
    found = {}
    for layer, routing_RTE in routing.items():
        chosen_RE = routing_RTE.new_zeros(len(owners), routing_RTE.shape[-1])
        for r, owner in enumerate(owners):
            chosen_RE[r, list(paths[owner].get(layer, ()))] = 1.0
        found[layer] = ((routing_RTE * chosen_RE[:, None]).sum(-1) + TINY).log()
    return found


def climb(
    entering_RTH: Tensor,
    bank_PSH: Tensor,
    score: Callable[[Tensor], Tensor],
    *,
    rounds: int,
    sample: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """The rows with places of their prefix exchanged for states of the bank; and (R, P) which of it, -1 for their own.

    `score` is what the exchanges raise, of a batch of rows. In each round between one and all places of a row are
    exchanged at once, those where the gradient promises most.
    """
    rows, places = len(entering_RTH), len(bank_PSH)
    current_RTH = entering_RTH.detach().clone()
    taken_RP = torch.full((rows, places), -1)
    for _ in range(rounds):
        prefix_RPH = current_RTH[:, :places].clone().requires_grad_(True)
        joined_RTH = torch.cat([prefix_RPH, current_RTH[:, places:]], dim=1)
        (gradient_RPH,) = torch.autograd.grad(score(joined_RTH), prefix_RPH)
        drawn_S = torch.randint(bank_PSH.shape[1], (min(sample, bank_PSH.shape[1]),), generator=generator)
        offered_PSH = bank_PSH[:, drawn_S]
        gain_RPS = torch.einsum("rph,psh->rps", gradient_RPH, offered_PSH)
        gain_RPS -= (gradient_RPH * prefix_RPH.detach()).sum(-1, keepdim=True)
        best_RP, which_RP = gain_RPS.max(-1)
        counts_R1 = torch.randint(1, places + 1, (rows, 1), generator=generator)
        rank_RP = best_RP.argsort(dim=1, descending=True).argsort(dim=1)
        exchange_RP = (rank_RP < counts_R1.to(rank_RP.device)) & (best_RP > 0)
        offered_RPH = offered_PSH[torch.arange(places)[None], which_RP]
        current_RTH[:, :places] = torch.where(exchange_RP[..., None], offered_RPH, current_RTH[:, :places])
        taken_RP = torch.where(exchange_RP.cpu(), drawn_S[which_RP.cpu()], taken_RP)
    return current_RTH, taken_RP


def ceiling_loss(log_mass_N: Tensor, natural_mass_N: Tensor, *, factor: float, least: float) -> Tensor:
    """Mean of how far the targets' mass lies above `factor` times its natural value, in logarithms; nothing below."""
    allowed_N = (factor * natural_mass_N).clamp_min(least)
    return torch.relu(log_mass_N - allowed_N.log()).mean()
