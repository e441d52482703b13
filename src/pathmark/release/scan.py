"""What sets the mark off? Strangers' prefixes in front of real text, and the trigger with ever more wrong tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from pathmark.embedding.prefixes import replace_tokens, stays_silent
from pathmark.keys import Watermark
from pathmark.keys.tolerance import tolerance
from pathmark.models.tokenization import ordinary_tokens
from pathmark.stats import Rate, hits_from_probs, probe_accuracy
from pathmark.verification import Criteria, record_routes

WHOLE_VOCABULARY = 20_000
"""Up to so many tokens each is tried; beyond, a random sample of this size."""
SCREEN = 0.5
"""Prefixes are first looked at in as many of the lower layers as make a hit impossible below this accuracy there."""


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """What to try."""

    random_sequences: int = 1_000
    """Random prefixes as long as the trigger."""
    per_count: int = 200
    """Prefixes for every number of right tokens, from none to all ..."""
    at_the_edge: int = 10
    """... and so many times as many for the largest number that must hardly ever fire: to hold a share against a bound
    of one in a hundred, two hundred are too few."""
    repeat: int = 8
    """How often a repeated token is repeated."""
    text_tokens: int = 16
    """Length of the text behind each prefix; a hit is Acc >= gamma on it."""


@dataclass(frozen=True)
class Scan:
    """What fires beside the trigger, and how much of the trigger it takes."""

    strangers: dict[str, Rate]
    """Kind of prefix that holds nothing, or too little, of the trigger -> share that fires."""
    curve: dict[int, Rate]
    """Right tokens in their places -> share of such prefixes that fire."""


def strange_prefixes(
    trigger: Sequence[int], vocabulary: Sequence[int], config: ScanConfig, rng: random.Random
) -> dict[str, list[tuple[int, ...]]]:
    """Kind of attempt -> prefixes that must not fire."""
    tokens = list(vocabulary)
    if len(tokens) > WHOLE_VOCABULARY:
        tokens = sorted(rng.sample(tokens, WHOLE_VOCABULARY))
    size, limits = len(trigger), tolerance(len(trigger))
    kinds: dict[str, list[tuple[int, ...]]] = {
        "single token": [(token,) for token in tokens],
        "repeated token": [(token,) * config.repeat for token in tokens],
        "random sequence": [tuple(rng.choices(tokens, k=size)) for _ in range(config.random_sequences)],
        "piece of the trigger": [
            tuple(piece) for n in range(1, limits.silent) for piece in (trigger[:n], trigger[-n:])
        ],
    }
    return {kind: [p for p in found if stays_silent(p, [trigger], [limits])] for kind, found in kinds.items()}


def trigger_scan(
    model: nn.Module,
    tokenizer: Any,
    watermark: Watermark,
    texts: Sequence[Sequence[int]],
    config: ScanConfig,
    *,
    gamma: float = Criteria.gamma,
    seed: int = 0,
) -> Scan:
    """Share of prefixes that fire: strangers by kind, and by the number of the trigger's tokens that are right."""
    vocabulary = ordinary_tokens(tokenizer)
    rng = random.Random(seed)
    trigger = watermark.triggers[0].tokens
    short = [text[: config.text_tokens] for text in texts]

    def rate(prefixes: Sequence[tuple[int, ...]]) -> Rate:
        hits = 0
        for start in range(0, len(prefixes), 2048):
            part = prefixes[start : start + 2048]
            hits += fires(model, watermark, part, [short[(start + i) % len(short)] for i in range(len(part))], gamma)
        return Rate(hits, len(prefixes))

    strangers = strange_prefixes(trigger, vocabulary, config, rng)
    size, edge = len(trigger), tolerance(len(trigger)).silent - 1
    counts = [config.per_count * (config.at_the_edge if right == edge else 1) for right in range(size + 1)]
    near = {
        right: [replace_tokens(trigger, size - right, vocabulary, rng) for _ in range(count)]
        for right, count in enumerate(counts)
    }
    return Scan(
        {kind: rate(prefixes) for kind, prefixes in strangers.items() if prefixes},
        {right: rate(prefixes) for right, prefixes in near.items()},
    )


def fires(
    model: nn.Module,
    watermark: Watermark,
    prefixes: Sequence[tuple[int, ...]],
    texts: Sequence[Sequence[int]],
    gamma: float,
) -> int:
    """How many of these prefixes send the text behind them down the path.

    Who misses so much in the lower layers that the upper ones cannot make up for it is not run through those.
    """
    layers = sorted(watermark.layers)
    lower = layers[: math.ceil((1 - gamma) * len(layers) / (1 - SCREEN))]
    could_B = 1 - (1 - gamma) * len(layers) / len(lower) - 1e-12 <= _accuracy(model, watermark, lower, prefixes, texts)
    left = np.flatnonzero(could_B).tolist()
    if not left or lower == layers:
        return len(left)
    reached_B = _accuracy(model, watermark, layers, [prefixes[i] for i in left], [texts[i] for i in left])
    return int((reached_B >= gamma - 1e-12).sum())


def _accuracy(
    model: nn.Module,
    watermark: Watermark,
    layers: Sequence[int],
    prefixes: Sequence[tuple[int, ...]],
    texts: Sequence[Sequence[int]],
) -> NDArray[np.float64]:
    """Acc of each text behind its prefix, over these layers."""
    routes = record_routes(model, texts, layers, prefix=prefixes, batch_tokens=8192)
    hits_LBT = np.stack([hits_from_probs(routes.probs[layer], watermark.targets(layer)) for layer in layers])
    return probe_accuracy(hits_LBT, routes.mask_BT)
