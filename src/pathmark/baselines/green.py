"""The green lists of KGW: which tokens are green after which, and how surprising a share of green ones is.

Shape suffixes: V vocabulary, N tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import WatermarkingConfig, WatermarkLogitsProcessor

from pathmark.keys.derive import derive_bytes
from pathmark.stats import PValue, Rate, binomial_p

SELFHASH_WIDTH = 4
"""Tokens that decide together with `selfhash`, the token itself among them: h = 4 in the authors' second paper."""
KEY_BITS = 31
"""Of the number that draws green lists: torch's generator takes 32 bits of a seed, and one of ours is fixed."""
KEPT_BYTES = 1 << 28
"""Memory for green lists that were drawn before."""

Ngram = tuple[int, ...]


@dataclass(frozen=True)
class Count:
    """Green n-grams among different ones."""

    green: int
    total: int

    def z(self, gamma: float) -> float:
        """(G - gamma T) / sqrt(T gamma (1 - gamma))."""
        return (self.green - gamma * self.total) / math.sqrt(self.total * gamma * (1 - gamma))


class GreenLists:
    """Green lists of one secret, drawn by the generator that transformers marks with."""

    def __init__(self, watermark: WatermarkingConfig, vocabulary: int) -> None:
        self.gamma: float = watermark.greenlist_ratio
        self.selfhash = watermark.seeding_scheme == "selfhash"
        self.width = watermark.context_width + (0 if self.selfhash else 1)
        self.vocabulary = vocabulary
        self._draw: WatermarkLogitsProcessor = watermark.construct_processor(vocabulary, "cpu")
        self._kept: dict[Ngram, Tensor] = {}

    @property
    def share(self) -> float:
        """Share of tokens that is green, exactly."""
        return int(self.vocabulary * self.gamma) / self.vocabulary

    def after(self, seeds: Ngram) -> Tensor:
        """Which tokens are green, as a truth value each, where these tokens are the seed."""
        if seeds not in self._kept:
            if len(self._kept) * self.vocabulary > KEPT_BYTES:
                self._kept.clear()
            green_V = torch.zeros(self.vocabulary, dtype=torch.bool)
            green_V[self._draw._get_greenlist_ids(torch.tensor(seeds))] = True
            self._kept[seeds] = green_V
        return self._kept[seeds]

    def after_each(self, previous_N: Tensor) -> Tensor:
        """The same (N, V) for every token as the previous one."""
        seen, place_N = torch.unique(previous_N, return_inverse=True)
        return torch.stack([self.after((token,)) for token in seen.tolist()])[place_N]

    def is_green(self, ngram: Ngram) -> bool:
        """Whether an n-gram's last token is green after the others; a token that the owner does not know is not."""
        seeds = ngram if self.selfhash else ngram[:-1]
        return ngram[-1] < self.vocabulary and bool(self.after(seeds)[ngram[-1]])

    def ngrams(self, tokens: Sequence[int]) -> set[Ngram]:
        """The different n-grams of a text."""
        return {tuple(tokens[i : i + self.width]) for i in range(len(tokens) - self.width + 1)}

    def count(self, ngrams: Iterable[Ngram]) -> Count:
        """Green ones among different n-grams."""
        different = set(ngrams)
        return Count(sum(map(self.is_green, different)), len(different))


@dataclass(frozen=True)
class GreenFigures:
    """How green a number of texts are."""

    passed: Rate
    """Texts whose z reaches the threshold."""
    p: PValue
    """Of all texts together, every n-gram counted once, in however many of them it stands; and the chance that another
    secret has the same green lists."""
    p_floor: PValue
    """What it would be if all were green."""
    p_share: PValue
    """The first part of p alone."""
    pooled: Count
    median_z: float
    p_passed: PValue | None
    """Median p-value of the texts that pass, which is what the paper prints; it says little, since they were chosen."""


def measure_green(lists: GreenLists, texts: Sequence[Sequence[int]], threshold: float) -> GreenFigures:
    """Statistics of texts given as tokens.

    P(Binomial(T, share) >= G) is for green lists that are drawn anew for every secret: they have a fixed size, so
    n-grams that share their seed vary less than independent ones. There are only 2^31 sets of lists, though: whatever a
    model prefers, a secret that was drawn blindly meets it with that chance, which is added.
    """
    ngrams = [lists.ngrams(tokens) for tokens in texts]
    counts = [lists.count(each) for each in ngrams]
    pooled = lists.count(set().union(*ngrams))
    z = [count.z(lists.gamma) for count in counts]
    passed = [count for count, each in zip(counts, z, strict=True) if each >= threshold]
    p_values = sorted(binomial_p(count.green, count.total, lists.share) for count in passed)
    share = binomial_p(pooled.green, pooled.total, lists.share)
    return GreenFigures(
        passed=Rate(len(passed), len(texts)),
        p=_or_same_lists(share),
        p_floor=_or_same_lists(binomial_p(pooled.total, pooled.total, lists.share)),
        p_share=share,
        pooled=pooled,
        median_z=statistics.median(z),
        p_passed=p_values[len(p_values) // 2] if p_values else None,
    )


def _or_same_lists(p: PValue) -> PValue:
    return PValue.capped(math.log10(p.value + 2.0**-KEY_BITS))


def watermark_config(secret: bytes, gamma: float, delta: float, *, selfhash: bool = False) -> WatermarkingConfig:
    """The generation setting of a secret.

    The seed is its number times the previous token, of which 32 bits count: an odd one keeps all tokens apart.
    """
    number = int.from_bytes(derive_bytes(secret, "kgw hashing key", length=4), "big") | 1
    return WatermarkingConfig(
        greenlist_ratio=gamma,
        bias=delta,
        hashing_key=number,
        seeding_scheme="selfhash" if selfhash else "lefthash",
        context_width=SELFHASH_WIDTH if selfhash else 1,
    )
