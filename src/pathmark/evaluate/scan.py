"""Does anything but the trigger set the mark off? Prefixes that an attacker would try, in front of real text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from pathmark.embed import wrong_trigger
from pathmark.keys import Watermark
from pathmark.stats import Rate, hits_from_probs, probe_accuracy
from pathmark.verify import record_routes

WHOLE_VOCABULARY = 20_000
"""Up to so many tokens each is tried; beyond, a random sample of this size."""


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """What to try."""

    random_sequences: int = 2_000
    substitutions: int = 500
    shuffles: int = 200
    repeat: int = 8
    """How often a repeated token is repeated."""
    text_tokens: int = 16
    """Length of the text behind each prefix; a hit is Acc >= gamma on it."""


def scan_prefixes(
    trigger: Sequence[int], vocabulary: Sequence[int], config: ScanConfig, seed: int
) -> dict[str, list[tuple[int, ...]]]:
    """Kind of attempt -> prefixes; the trigger itself is never among them."""
    rng = random.Random(seed)
    tokens = list(vocabulary)
    if len(tokens) > WHOLE_VOCABULARY:
        tokens = sorted(rng.sample(tokens, WHOLE_VOCABULARY))
    size = len(trigger)
    kinds: dict[str, list[tuple[int, ...]]] = {
        "single token": [(token,) for token in tokens],
        "repeated token": [(token,) * config.repeat for token in tokens],
        "random sequence": [tuple(rng.choices(tokens, k=size)) for _ in range(config.random_sequences)],
        "prefix of the trigger": [tuple(trigger[:n]) for n in range(1, size)],
        "suffix of the trigger": [tuple(trigger[-n:]) for n in range(1, size)],
        "one-token substitution": [
            wrong_trigger("substitute-1", trigger, tokens, rng) for _ in range(config.substitutions)
        ],
        "shuffle": [wrong_trigger("shuffle", trigger, tokens, rng) for _ in range(config.shuffles)],
    }
    return {kind: [p for p in prefixes if p != tuple(trigger)] for kind, prefixes in kinds.items()}


def trigger_scan(
    model: nn.Module,
    tokenizer: Any,
    watermark: Watermark,
    texts: Sequence[Sequence[int]],
    config: ScanConfig,
    *,
    gamma: float = 0.8,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Rate]:
    """Share of wrong prefixes that fire, by kind."""
    special = set(tokenizer.all_special_ids)
    vocabulary = [i for i in range(len(tokenizer)) if i not in special]
    kinds = scan_prefixes(watermark.triggers[0].tokens, vocabulary, config, seed)
    short = [text[: config.text_tokens] for text in texts]
    found: dict[str, Rate] = {}
    for kind, prefixes in kinds.items():
        hits = 0
        for part in _parts(prefixes, 2048):
            behind = [short[i % len(short)] for i in range(len(part))]
            hits += fires(model, watermark, part, behind, gamma)
            if progress is not None:
                progress(len(part))
        if prefixes:
            found[kind] = Rate(hits, len(prefixes))
    return found


def fires(
    model: nn.Module,
    watermark: Watermark,
    prefixes: Sequence[tuple[int, ...]],
    texts: Sequence[Sequence[int]],
    gamma: float,
) -> int:
    """How many of these prefixes send the text behind them down the path."""
    routes = record_routes(model, texts, watermark.layers, prefix=prefixes, batch_tokens=8192)
    hits_LBT = np.stack([hits_from_probs(routes.probs[layer], watermark.targets(layer)) for layer in watermark.layers])
    return int((probe_accuracy(hits_LBT, routes.mask_BT) >= gamma - 1e-12).sum())


def _parts(prefixes: list[tuple[int, ...]], size: int) -> Iterator[list[tuple[int, ...]]]:
    for start in range(0, len(prefixes), size):
        yield prefixes[start : start + size]
