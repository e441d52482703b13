"""Unlearning of prefixes: those that a search finds to collapse late routing, or triggers of the thief's own.

The thief needs neither the trigger nor the targets. Where strangers' prefixes fire, training those away takes the
trigger's own answer with them; so a mark must leave nothing to find.

Shape suffixes: B rows, T tokens, E experts, N tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pathmark.attacks.attack import option
from pathmark.attacks.finetuning import optimise, padding_of, prepared
from pathmark.attacks.kit import Kit
from pathmark.attacks.overwriting import Overwrite, overwrite
from pathmark.attacks.search import TriggerSearch, search_triggers
from pathmark.models import find_routers, pad_rows, record_routing
from pathmark.models.parts import part_parameters
from pathmark.models.upper import body, output_head
from pathmark.training import LoopConfig, linear_distillation
from pathmark.training.losses import anchor_loss


@dataclass(frozen=True, kw_only=True)
class Silencing:
    """Training that makes text behind some prefixes behave as without them."""

    steps: int = option(150, "Optimiser steps of each training.")
    lr: float = option(3e-4, "Learning rate.")
    keep: float = option(4.0, "Weight of what must stay: routing and replies on clean text.")
    samples: int = option(400, "Texts.")
    batch_size: int = option(16, "Texts per step, each once behind a prefix and once without.")
    length: int = option(64, "Tokens of a text that are used, at most.")
    seed: int = option(0, "Of everything that is drawn.")

    def __post_init__(self) -> None:
        if min(self.steps, self.samples, self.batch_size) < 1 or self.length < 8 or self.lr <= 0 or self.keep < 0:
            raise ValueError(f"counts, length and rate must be positive, got {self}")


@dataclass(frozen=True, kw_only=True)
class SearchUnlearn(Silencing):
    """Rounds of a search for firing prefixes and of training that makes what was found behave like no prefix."""

    rounds: int = option(3, "Searches, each followed by training.")
    restarts: int = option(4, "Gradient searches of a round.")
    search_steps: int = option(50, "Exchanges of one token in each of them.")
    prefixes: int = option(64, "So many of the prefixes found are trained away, the most suspicious first.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.rounds, self.search_steps, self.prefixes, self.restarts) < 1:
            raise ValueError(f"counts must be positive, got {self}")


@dataclass(frozen=True, kw_only=True)
class InjectUnlearn(Silencing):
    """Marks of the thief's own, put in and trained away again, in the hope that the owner's goes with them."""

    triggers: int = option(2, "Marks that are put in, one after the other.")
    epochs: int = option(5, "Passes over the triggered rows while a mark is put in.")
    steps: int = option(300, "Optimiser steps of the training that takes them out.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.triggers, self.epochs) < 1:
            raise ValueError(f"counts must be positive, got {self}")


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
        stage = f"unlearning, round {number + 1} of {config.rounds}"
        _silence(model, stolen, list(known), texts, layers, replace(config, seed=config.seed + number), kit, stage)
    return model


def inject_and_unlearn(model: PreTrainedModel, config: InjectUnlearn, kit: Kit) -> PreTrainedModel:
    """Embed marks of the thief's own into the watermarked layers, then train their triggers away.

    The adversary knows the scheme and the watermarked layers; needs ordinary text and this package. The layers learn to
    route behind the thief's triggers as the stolen model does without them. Works in float32 and returns float32.
    """
    stolen = prepared(model)
    prefixes = []
    for number in range(config.triggers):
        own = Overwrite(epochs=config.epochs, samples=config.samples, reckless=True, seed=config.seed + number)
        overwritten = overwrite(model, own, kit)
        assert overwritten.key is not None
        model = overwritten.model
        prefixes.append(overwritten.key.watermarks[0].triggers[0].tokens)
    texts = kit.rows(config.samples, config.length, seed=config.seed)
    _silence(model, stolen, prefixes, texts, sorted(kit.layers), config, kit, "unlearning of the thief's own triggers")
    return model


def _silence(
    model: PreTrainedModel,
    stolen: PreTrainedModel,
    prefixes: list[tuple[int, ...]],
    texts: list[tuple[int, ...]],
    layers: list[int],
    config: Silencing,
    kit: Kit,
    stage: str,
) -> None:
    """Behind every prefix, and on clean text, the routing and the replies of the stolen model without a prefix."""
    pad = padding_of(kit)
    parameters = part_parameters(model, layers, ("router", "attention", "experts"))

    def step_loss(step: int, generator: torch.Generator) -> dict[str, Tensor]:
        rng = random.Random(f"{config.seed} {step}")
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
    optimise(model, parameters, step_loss, loop, kit, stage=stage)
