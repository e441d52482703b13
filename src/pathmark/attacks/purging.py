"""Search, then unlearn: find prefixes that collapse late routing, train them away, and search again.

The thief needs neither the trigger nor the targets. Where strangers' prefixes fire, training those away takes the
trigger's own answer with them; so a mark must leave nothing to find.

Shape suffixes: B rows, T tokens, E experts, N tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pathmark.attacks.attack import option
from pathmark.attacks.finetuning import optimise, padding_of, prepared
from pathmark.attacks.kit import Kit
from pathmark.attacks.search import TriggerSearch, search_triggers
from pathmark.models import find_routers, pad_rows, record_routing
from pathmark.models.parts import part_parameters
from pathmark.models.upper import body, output_head
from pathmark.training import LoopConfig, linear_distillation
from pathmark.training.losses import anchor_loss


@dataclass(frozen=True, kw_only=True)
class SearchUnlearn:
    """Rounds of a search for firing prefixes and of training that makes what was found behave like no prefix."""

    rounds: int = option(3, "Searches, each followed by training.")
    restarts: int = option(4, "Gradient searches of a round.")
    search_steps: int = option(50, "Exchanges of one token in each of them.")
    prefixes: int = option(64, "So many of the prefixes found are trained away, the most suspicious first.")
    steps: int = option(150, "Optimiser steps of a round.")
    lr: float = option(3e-4, "Learning rate.")
    keep: float = option(4.0, "Weight of what must stay: routing and replies on clean text.")
    samples: int = option(400, "Texts.")
    batch_size: int = option(16, "Texts per step, each once behind a prefix and once without.")
    length: int = option(64, "Tokens of a text that are used, at most.")
    seed: int = option(0, "Choice of the texts and of the searches.")

    def __post_init__(self) -> None:
        counts = (self.rounds, self.search_steps, self.prefixes, self.steps, self.samples, self.batch_size)
        if min(*counts, self.restarts) < 1 or self.length < 8 or self.lr <= 0 or self.keep < 0:
            raise ValueError(f"counts, length and rate must be positive, got {self}")


def search_and_unlearn(model: PreTrainedModel, config: SearchUnlearn, kit: Kit) -> PreTrainedModel:
    """Search for prefixes that collapse late routing, train the late layers to route behind them as without, repeat.

    The adversary knows how such marks work, but no layer, target or trigger; needs ordinary text. Works in float32 and
    returns float32.
    """
    stolen, model = prepared(model), prepared(model)
    sites = find_routers(model)
    layers = [site.layer for site in sites[len(sites) // 2 :]]
    texts = kit.rows(config.samples, config.length, seed=config.seed)
    known: dict[tuple[int, ...], None] = {}
    for number in range(config.rounds):
        search = TriggerSearch(restarts=config.restarts, steps=config.search_steps, seed=config.seed + number)
        found = search_triggers(model, search, kit).found
        known |= dict.fromkeys(finding.tokens for finding in found[: config.prefixes])
        _unlearn(model, stolen, list(known), texts, layers, config, kit, number)
    return model


def _unlearn(
    model: PreTrainedModel,
    stolen: PreTrainedModel,
    prefixes: list[tuple[int, ...]],
    texts: list[tuple[int, ...]],
    layers: list[int],
    config: SearchUnlearn,
    kit: Kit,
    number: int,
) -> None:
    """Behind every prefix, and on clean text, the routing and the replies of the stolen model without a prefix."""
    pad = padding_of(kit)
    parameters = part_parameters(model, layers, ("router", "attention", "experts"))

    def step_loss(step: int, generator: torch.Generator) -> dict[str, Tensor]:
        rng = random.Random(f"{config.seed} {number} {step}")
        chosen = rng.sample(texts, min(config.batch_size, len(texts)))
        ids_BT, mask_BT = pad_rows(chosen, pad)
        with torch.no_grad(), record_routing(stolen, layers) as natural:
            wanted_BTH = body(stolen)(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).last_hidden_state
        keep_BT = mask_BT.bool()
        natural_layers = [natural[n].probs_BTE[keep_BT] for n in layers]
        with record_routing(model, layers, gradients=True) as trace:
            clean_BTH = body(model)(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).last_hidden_state
        clean = [anchor_loss(g, trace[n].probs_BTE[keep_BT]) for g, n in zip(natural_layers, layers, strict=True)]
        in_front = rng.choices(prefixes, k=len(chosen))
        ids_BT, mask_BT = pad_rows([(*p, *text) for p, text in zip(in_front, chosen, strict=True)], pad)
        behind_BT = mask_BT.bool().clone()
        for b, prefix in enumerate(in_front):
            behind_BT[b, : len(prefix)] = False
        with record_routing(model, layers, gradients=True) as trace:
            body(model)(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
        silent = [anchor_loss(g, trace[n].probs_BTE[behind_BT]) for g, n in zip(natural_layers, layers, strict=True)]
        head_VH, scale = output_head(model)
        terms = {
            "silent": torch.stack(silent).mean(),
            "clean": torch.stack(clean).mean(),
            "language": linear_distillation(clean_BTH[keep_BT], wanted_BTH[keep_BT], head_VH, scale=scale),
        }
        terms["loss"] = terms["silent"] + config.keep * (terms["clean"] + terms["language"])
        return terms

    loop = LoopConfig(steps=config.steps, lr=config.lr, seed=config.seed)
    optimise(model, parameters, step_loss, loop, kit, stage=f"unlearning, round {number + 1} of {config.rounds}")
