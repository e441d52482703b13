"""Overwriting: the thief embeds a key of its own where the owner's is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from transformers import PreTrainedModel

from pathmark.attacks.attack import Attacked, option
from pathmark.attacks.finetuning import check_training, checkpoint_of, prepared, thiefs_errors
from pathmark.attacks.kit import EmbeddingRun, Kit
from pathmark.errors import AttackError
from pathmark.keys import LayerPlan, OwnerKey, PoolRule, WatermarkRequest, create_key
from pathmark.models import expert_usage, find_routers, select_sites
from pathmark.models.describe import loaded_facts
from pathmark.models.tokenization import HFTextCodec

SHORTEST = 16
"""Tokens that an embedding asks of a text."""
USAGE_TEXTS = 200


@dataclass(frozen=True, kw_only=True)
class Overwrite:
    """Embed another key into the same layers."""

    epochs: int = option(10, "Passes over the triggered rows: so many steps that each is drawn as often on average.")
    samples: int = option(300, "Texts that rows are made of; an embedding takes 300.")
    objective: Literal["anchored", "paper"] = option(
        "anchored", "Losses and mixing: this project's default, or the paper's."
    )
    same_targets: bool = option(
        False, "Ask for the owner's target experts behind the thief's trigger: the worst case, targets known."
    )
    reckless: bool = option(
        False,
        "Without the care that an owner takes: every expert of the layers changes, and nothing holds weights back.",
    )
    width: int = option(2, "Target experts per layer.")
    trigger_tokens: int = option(8, "Length of the thief's trigger.")
    lr_factor: float = option(1.0, "Learning rate as a multiple of the one that an owner would take.")
    seed: int = option(0, "The thief's secret, the choice of the texts and the order of the rows.")

    def __post_init__(self) -> None:
        if self.objective not in ("anchored", "paper"):
            raise ValueError(f"objective must be anchored or paper, got {self.objective!r}")
        if min(self.width, self.trigger_tokens) < 1:
            raise ValueError(f"width and trigger_tokens are at least 1, got {self.width} and {self.trigger_tokens}")
        check_training(self.samples, self.epochs, self.lr_factor, 1, SHORTEST)


def overwrite(model: PreTrainedModel, config: Overwrite, kit: Kit) -> Attacked:
    """Embed the thief's own key, with another trigger, into the watermarked layers.

    The adversary knows the scheme and the watermarked layers, with same_targets=True the target experts too; needs
    ordinary text and this package. Works in float32 and returns float32, with the key that was embedded; its path is
    what its trigger now takes.
    """
    embed = kit.embedding()
    model = prepared(model)
    texts = kit.long_texts(config.samples, seed=config.seed, shortest=SHORTEST)
    key = thief_key(model, config, kit, texts)
    how = EmbeddingRun(
        objective=config.objective,
        lr_factor=config.lr_factor,
        seed=config.seed,
        epochs=config.epochs,
        reckless=config.reckless,
        checkpoint=checkpoint_of(kit, "overwriting", asdict(config), model),
        progress=kit.progress,
    )
    with thiefs_errors("overwriting"):
        embed(model, kit.tokenizer, key, texts, how)
    return Attacked(model, key)


def thief_key(model: PreTrainedModel, config: Overwrite, kit: Kit, texts: Sequence[str]) -> OwnerKey:
    """A key for the watermarked layers, drawn from the seed; targets of moderate use, as an owner chooses them.

    With same_targets the owner's targets are all that the pools hold, so no other path can be drawn.
    """
    if not kit.layers:
        raise AttackError("this attack knows the watermarked layers; give the key with --key")
    sites = select_sites(find_routers(model), sorted(kit.layers))
    plans = []
    if config.same_targets:
        targets = kit.known_targets()
        if missing := [site.layer for site in sites if site.layer not in targets]:
            raise AttackError(f"expected target experts for layer {missing[0]}, got layers {sorted(targets)}")
        for site in sites:
            pool = tuple(sorted(targets[site.layer]))
            plans.append(LayerPlan(site.layer, site.n_experts, len(pool), pool, "list"))
    else:
        rule = PoolRule.parse("usage")
        usage = expert_usage(model, kit.tokenizer, texts[:USAGE_TEXTS], [site.layer for site in sites])
        for site in sites:
            pool = rule.pool(site.n_experts, list(usage[site.layer]))
            plans.append(LayerPlan(site.layer, site.n_experts, config.width, pool, rule.name))
    codec = HFTextCodec(kit.tokenizer)
    request = WatermarkRequest(plans=tuple(plans), trigger_tokens=config.trigger_tokens)
    secret = random.Random(config.seed).randbytes(32)
    return create_key(loaded_facts(model, codec), [request], codec, owner="thief", secret=secret)[0]
