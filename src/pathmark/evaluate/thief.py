"""What a thief has, put together for an attack or a whole suite of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from transformers import PreTrainedModel

from pathmark.attacks.finetuning import CHECKPOINT_EVERY
from pathmark.attacks.kit import EmbeddingRun, Kit
from pathmark.embedding import default_config, embed_key
from pathmark.keys import OwnerKey
from pathmark.models import find_routers
from pathmark.progress import Progress, Silent
from pathmark.training import LoopConfig


def make_kit(
    tokenizer: Any,
    texts: Sequence[str],
    key: OwnerKey | None = None,
    *,
    original: PreTrainedModel | None = None,
    sibling: PreTrainedModel | None = None,
    progress: Progress | None = None,
) -> Kit:
    """The kit of a thief; with a key it knows the marked layers and the targets of the first watermark."""
    marks = () if key is None else key.watermarks
    return Kit(
        tokenizer=tokenizer,
        texts=texts,
        original=original,
        sibling=sibling,
        layers=() if key is None else key.layers,
        targets={layer: mark.targets(layer) for mark in marks[:1] for layer in mark.layers},
        embed=thief_embedding,
        progress=progress or Silent(),
    )


def thief_embedding(
    model: PreTrainedModel, tokenizer: Any, key: OwnerKey, texts: Sequence[str], how: EmbeddingRun
) -> int:
    """This package's embedding as an owner uses it, or without the owner's care."""
    width = int(find_routers(model)[0].weight.shape[1])
    settings = default_config(cast(Literal["anchored", "paper"], how.objective), width)
    rate = how.lr_factor * settings.loop.lr
    loop = replace(settings.loop, lr=rate, seed=how.seed, checkpoint_every=CHECKPOINT_EVERY)
    if how.reckless:
        loop = LoopConfig(steps=1, lr=rate, seed=how.seed, checkpoint_every=CHECKPOINT_EVERY)
        settings = replace(settings, train="router+attention+experts")
    settings = replace(settings, texts=len(texts), loop=loop)
    return embed_key(
        model, tokenizer, key, texts, settings,
        epochs=how.epochs, checkpoint=how.checkpoint, resume=True, progress=how.progress,
    )  # fmt: skip
