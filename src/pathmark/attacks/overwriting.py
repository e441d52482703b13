"""Overwriting: the thief embeds a key of its own where the owner's is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from transformers import PreTrainedModel

from pathmark.attacks.finetuning import CHECKPOINT_EVERY, attack_rate, check_training, prepared
from pathmark.attacks.kit import Kit
from pathmark.embedding import default_config, embed_key
from pathmark.errors import AttackError, CheckpointError, DivergedError, TrainingError
from pathmark.keys import LayerPlan, OwnerKey, PoolRule, WatermarkRequest, create_key
from pathmark.keys.facts import ModelFacts, RoutedLayer
from pathmark.models import count_layers, expert_usage, find_routers, select_sites
from pathmark.models.describe import config_digest
from pathmark.models.tokenization import HFTextCodec
from pathmark.training import LoopConfig

SHORTEST = 16
"""Tokens that an embedding asks of a text."""
USAGE_TEXTS = 200


@dataclass(frozen=True, kw_only=True)
class Overwrite:
    """Embed another key into the same layers."""

    epochs: int = 10
    """Passes over the triggered rows: so many steps that each is drawn as often on average."""
    samples: int = 300
    """Texts that rows are made of; an embedding takes 300."""
    objective: Literal["anchored", "paper"] = "anchored"
    """Losses and mixing: this project's default, or the paper's."""
    same_targets: bool = False
    """Ask for the owner's target experts behind the thief's trigger: the worst case, targets known."""
    width: int = 2
    """Target experts per layer."""
    trigger_tokens: int = 8
    """Length of the thief's trigger."""
    lr_factor: float = 1.0
    """Learning rate as a multiple of the one that marks are embedded with."""
    seed: int = 0
    """The thief's secret, the choice of the texts and the order of the rows."""

    def __post_init__(self) -> None:
        if self.objective not in ("anchored", "paper"):
            raise ValueError(f"objective must be anchored or paper, got {self.objective!r}")
        if min(self.width, self.trigger_tokens) < 1:
            raise ValueError(f"width and trigger_tokens are at least 1, got {self.width} and {self.trigger_tokens}")
        check_training(self.samples, self.epochs, self.lr_factor, 1, SHORTEST)


def overwrite(model: PreTrainedModel, config: Overwrite, kit: Kit) -> PreTrainedModel:
    """Embed the thief's own key, with another trigger, into the watermarked layers.

    The adversary knows the scheme and the watermarked layers, with same_targets=True the target experts too; needs
    ordinary text and this package. Works in float32 and returns float32.
    """
    return overwrite_with_key(model, config, kit)[0]


def overwrite_with_key(model: PreTrainedModel, config: Overwrite, kit: Kit) -> tuple[PreTrainedModel, OwnerKey]:
    """The same, with the key that was embedded; its path is what its trigger now takes."""
    model = prepared(model)
    texts = _texts(kit, config)
    key = thief_key(model, config, kit, texts)
    settings = default_config(config.objective)
    settings = replace(
        settings,
        texts=config.samples,
        # a thief need not spare the experts that are no targets
        train="router+attention+experts" if "targets" in settings.train else settings.train,
        loop=LoopConfig(
            steps=1, lr=attack_rate(model, config.lr_factor), seed=config.seed, checkpoint_every=CHECKPOINT_EVERY
        ),
    )
    checkpoint = None if kit.unfinished is None else kit.unfinished / "overwriting.ckpt"
    try:
        embed_key(
            model, kit.tokenizer, key, texts, settings, epochs=config.epochs,
            checkpoint=checkpoint, resume=True, progress=kit.progress,
        )  # fmt: skip
    except CheckpointError as error:
        raise AttackError(f"overwriting: {error}") from error
    except TrainingError as error:  # it speaks to an owner who embeds
        raise DivergedError(f"overwriting: {str(error).partition(';')[0]}; try a smaller lr_factor") from error
    return model, key


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
    return create_key(_facts(model, codec), [request], codec, owner="thief", secret=secret)[0]


def _texts(kit: Kit, config: Overwrite) -> list[str]:
    """Random texts that are long enough; the embedder wants them as text."""
    if kit.tokenizer is None or not kit.texts:
        raise AttackError("this attack needs ordinary text and the model's tokenizer; give some with --corpus")
    order = random.Random(config.seed).sample(range(len(kit.texts)), len(kit.texts))
    found: list[str] = []
    for i in order:
        if len(found) == config.samples:
            break
        if len(kit.tokenizer(kit.texts[i], add_special_tokens=False)["input_ids"]) >= SHORTEST:
            found.append(kit.texts[i])
    if len(found) < config.samples:
        raise AttackError(
            f"expected {config.samples} texts of at least {SHORTEST} tokens, got {len(found)}; give a larger --corpus, "
            "or ask for fewer samples"
        )
    return found


def _facts(model: PreTrainedModel, codec: HFTextCodec) -> ModelFacts:
    sites = find_routers(model)
    return ModelFacts(
        architecture=type(model).__name__,
        model_type=str(model.config.model_type),
        num_layers=count_layers(model, sites),
        routed=tuple(RoutedLayer(site.layer, site.n_experts, site.top_k) for site in sites),
        vocab_size=int(model.config.get_text_config().vocab_size),
        tokenizer_digest=codec.digest,
        config_digest=config_digest(model.config),
    )
