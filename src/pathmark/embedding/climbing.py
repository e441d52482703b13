"""Wrong prefixes made worse by gradient, so that nobody finds a firing one the same way.

A trigger that tolerates wrong tokens adds up evidence token by token, and a gradient search finds prefixes of
strangers' tokens that fire. So part of the wrong prefixes of a step climb first: what enters the first marked layer at
their places is exchanged, place by place, for what other real tokens leave at the same place, as the gradient of the
targets' mass recommends. What they reach is then pressed under a ceiling.

Shape suffixes: R rows, P places of the prefix, T tokens, H hidden size, S states of the bank, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pathmark.embedding.data import Row
from pathmark.embedding.prefixes import stays_silent
from pathmark.keys.tolerance import tolerance
from pathmark.training import Batch
from pathmark.training.losses import TINY

BANK, BANK_TOKENS = 4096, 4096
"""States at each place, and tokens at a time while they are made."""


@dataclass(frozen=True, kw_only=True)
class ClimbConfig:
    """How much wrong prefixes are driven towards firing."""

    share: float = 0.5
    """Of the raw wrong prefixes as long as a trigger, in steps of short rows, so many climb first."""
    begin: float = 0.2
    """They do so from this share of the steps on, when there is something to climb."""
    rounds: int = 3
    """Rounds of exchanges."""
    sample: int = 1024
    """States offered at every place in each round."""

    def __post_init__(self) -> None:
        if not (0 <= self.share <= 1 and 0 <= self.begin <= 1) or min(self.rounds, self.sample) < 1:
            raise ValueError(f"expected shares between 0 and 1, rounds and sample of at least 1, got {self}")


@dataclass(frozen=True)
class Bank:
    """What tokens drawn at random leave at every place of a prefix."""

    tokens_SP: Tensor
    states_PSH: Tensor


def draw_bank(
    entering: Callable[[Tensor], Tensor], vocabulary: Sequence[int], places: int, generator: torch.Generator
) -> Bank:
    """Random prefixes and what they leave before the first marked layer; at each place every token once, if they fit.

    `entering` gives the hidden states (rows, places, hidden) that enter that layer for token rows.
    """
    known_V = torch.tensor(vocabulary)
    tokens_SP = torch.stack(
        [known_V[torch.randperm(len(known_V), generator=generator)[:BANK]] for _ in range(places)], dim=1
    )
    states_SPH = torch.cat([entering(part_SP) for part_SP in torch.split(tokens_SP, max(1, BANK_TOKENS // places))])
    return Bank(tokens_SP, states_SPH.transpose(0, 1).contiguous())


class Climbers:
    """The rows of a run that may climb, by the length of their prefix, and the states that they may take."""

    def __init__(
        self,
        rows: Sequence[Row],
        candidates: Iterable[int],
        triggers: Sequence[Sequence[int]],
        make_bank: Callable[[int], Bank],
    ) -> None:
        self._rows, self._triggers = rows, triggers
        self._limits = [tolerance(len(trigger)) for trigger in triggers]
        self.able: dict[int, list[int]] = {len(trigger): [] for trigger in triggers}
        for i in candidates:
            if rows[i].prefix_from == 0 and rows[i].text_from in self.able:
                self.able[rows[i].text_from].append(i)
        self.able = {places: found for places, found in self.able.items() if found}
        self._members = {places: set(found) for places, found in self.able.items()}
        self._banks = {places: make_bank(places) for places in self.able}

    def climb(
        self,
        chosen: Sequence[int],
        batch: Batch,
        log_mass: Callable[[Batch, Sequence[int]], Mapping[int, Tensor]],
        config: ClimbConfig,
        generator: torch.Generator,
    ) -> tuple[Batch, Tensor]:
        """The batch of these rows with part of its wrong prefixes driven towards firing, and (B,) which those are.

        `log_mass` gives, per layer, the targets' log mass on every token of some rows, whose watermarks are given.
        """
        assert batch.entering_BTH is not None
        entering_BTH = batch.entering_BTH.clone()
        climbed_B = torch.zeros(len(chosen), dtype=torch.bool)
        for places in self.able:
            able = [b for b, i in enumerate(chosen) if i in self._members[places]]
            able = [b for b in able if float(torch.rand(1, generator=generator)) < config.share]
            if not able:
                continue
            part, bank = batch.rows(able), self._banks[places]
            assert part.entering_BTH is not None
            text_RT = part.mask_BT.bool()
            text_RT[:, :places] = False
            owners = [self._rows[chosen[b]].watermark for b in able]

            def score(
                entering_RTH: Tensor, part: Batch = part, text_RT: Tensor = text_RT, owners: Sequence[int] = owners
            ) -> Tensor:
                mass = log_mass(replace(part, entering_BTH=entering_RTH), owners)
                return torch.stack([log_RT[text_RT].mean() for log_RT in mass.values()]).sum()

            moved_RTH, taken_RP = climb(
                part.entering_BTH, bank.states_PSH, score,
                rounds=config.rounds, sample=config.sample, generator=generator,
            )  # fmt: skip
            for r, b in enumerate(able):
                prefix = list(self._rows[chosen[b]].ids[:places])
                for place, state in enumerate(taken_RP[r].tolist()):
                    prefix[place] = prefix[place] if state < 0 else int(bank.tokens_SP[state, place])
                if stays_silent(prefix, self._triggers, self._limits):
                    entering_BTH[b, : moved_RTH.shape[1]] = moved_RTH[r]
                    climbed_B[b] = True
        return replace(batch, entering_BTH=entering_BTH), climbed_B.to(batch.ids_BT.device)


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


def above_ceiling(log_mass_N: Tensor, natural_mass_N: Tensor, *, factor: float, least: float) -> Tensor:
    """How far each token's mass on the targets lies above `factor` times its natural value, in logarithms."""
    allowed_N = (factor * natural_mass_N).clamp_min(least)
    return torch.relu(log_mass_N - allowed_N.log())
