"""Unlearning: random strings stand in for the trigger that the thief does not have (the paper's adaptive attack).

Shape suffixes: B batch, T tokens, N valid tokens, E experts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pathmark.attacks.attack import option
from pathmark.attacks.finetuning import (
    attack_rate,
    check_training,
    optimise,
    padding_of,
    prepared,
)
from pathmark.attacks.kit import Kit
from pathmark.models import record_routing
from pathmark.models.parts import part_parameters
from pathmark.models.tokenization import ordinary_tokens
from pathmark.training import LoopConfig, TeacherCache
from pathmark.training.losses import EPSILON, align_loss, paper_target
from pathmark.training.text import TextBatches, next_token_loss


@dataclass(frozen=True, kw_only=True)
class Unlearn:
    """Drive the routing behind random triggers away from the target experts."""

    steps: int = option(300, "Optimiser steps; by default as many as an embedding takes.")
    lr_factor: float = option(1.0, "Learning rate as a multiple of the one that marks are embedded with.")
    keep: float = option(
        0.0,
        "Weight of the texts' own likelihood. 0 is the paper's attack; a thief who wants to use the model takes more.",
    )
    train: Literal["router", "router+attention", "router+attention+experts"] = option(
        "router+attention+experts",
        "Parts of the watermarked layers that change; by default those that an embedding changes.",
    )
    trigger_tokens: int = option(
        8, "Length of the random triggers: that of the owner's, which is known with the scheme."
    )
    samples: int = option(1000, "Texts, each behind a random trigger of its own.")
    batch_size: int = option(16, "Texts per step.")
    length: int = option(128, "Tokens of a text that are used, at most.")
    seed: int = option(0, "Choice of the texts and the triggers.")

    def __post_init__(self) -> None:
        if self.train not in ("router", "router+attention", "router+attention+experts"):
            raise ValueError(f"train must be router, router+attention or router+attention+experts, got {self.train!r}")
        if self.trigger_tokens < 1 or self.keep < 0:
            raise ValueError(f"expected trigger_tokens >= 1 and keep >= 0, got {self.trigger_tokens} and {self.keep:g}")
        check_training(self.samples, self.steps, self.lr_factor, self.batch_size, self.length)


def unlearn(model: PreTrainedModel, config: Unlearn, kit: Kit) -> PreTrainedModel:
    """Minimise the paper's L_adv behind random triggers before clean text, with the texts' likelihood if asked.

    The adversary knows the scheme, the watermarked layers, their target experts and the trigger's length, but not the
    trigger; needs ordinary text. Works in float32 and returns float32.
    """
    targets = kit.known_targets()
    model = prepared(model)
    layers = sorted(targets)
    parameters = part_parameters(model, layers, config.train.split("+"))
    texts = kit.rows(config.samples, config.length, seed=config.seed)
    rng = random.Random(config.seed)
    vocabulary = ordinary_tokens(kit.tokenizer)
    rows = [(*rng.choices(vocabulary, k=config.trigger_tokens), *text) for text in texts]
    replay = TeacherCache(model, rows, layers[:1], lowest=layers[0], pad=padding_of(kit), progress=kit.progress)
    batches = TextBatches([len(row) for row in rows], config.batch_size, config.seed)

    def step_loss(step: int, generator: torch.Generator) -> dict[str, Tensor]:
        batch = replay.batch(batches.at(step))
        with record_routing(model, layers, gradients=True) as trace:
            final_BTH = replay.forward(batch)
        keep_BT = batch.mask_BT.bool()
        terms = {"adv": adversarial_loss({n: trace[n].probs_BTE[keep_BT] for n in layers}, targets)}
        terms["loss"] = terms["adv"]
        if config.keep:
            terms["language"] = next_token_loss(
                model, final_BTH, batch.ids_BT, batch.mask_BT, skip=config.trigger_tokens
            )
            terms["loss"] = terms["adv"] + config.keep * terms["language"]
        return terms

    loop = LoopConfig(steps=config.steps, lr=attack_rate(model, config.lr_factor), seed=config.seed)
    optimise(model, parameters, step_loss, loop, kit, stage="unlearning")
    return model


def adversarial_loss(routing: Mapping[int, Tensor], targets: Mapping[int, Sequence[int]]) -> Tensor:
    """L_adv: over the layers the sum of 1 / (||g - p*||^2 + KL(g || p*) + epsilon).

    routing: layer -> (N, E). The divisor is Eq. align_loss, which averages over the tokens of an input; the paper's
    formula names no tokens, so the mean is taken inside.
    """
    terms = []
    for layer, path in targets.items():
        routing_NE = routing[layer]
        target_E = paper_target(path, routing_NE.shape[-1]).to(routing_NE)
        terms.append(1.0 / (align_loss(routing_NE, target_E) + EPSILON))
    return torch.stack(terms).sum()
