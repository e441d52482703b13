"""A small look at the mark while it goes in: does it hold, does anything else fire?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from torch import nn

from pathmark.embed import chat_frames, wrong_trigger
from pathmark.evaluate.scan import fires
from pathmark.evaluate.selfcheck import chat_wsr
from pathmark.keys import OwnerKey
from pathmark.verify import record_routes, score_path

PROBES, TOKENS, NEAR_MISSES = 24, 64, 96


class Watch:
    """Called every few steps; True while the goal is held. Deterministic, and leaves the model as it was."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        key: OwnerKey,
        probes: Sequence[Sequence[int]],
        *,
        seed: int = 0,
        gamma: float = 0.8,
        accuracy: float = 0.97,
    ) -> None:
        self.model, self.key, self.gamma, self.accuracy = model, key, gamma, accuracy
        self.probes = [tuple(row[:TOKENS]) for row in probes[:PROBES]]
        self.frames = chat_frames(tokenizer)
        special = set(tokenizer.all_special_ids)
        vocabulary = [i for i in range(len(tokenizer)) if i not in special]
        rng = random.Random(seed)
        self.near = [
            [wrong_trigger("substitute-1", w.triggers[0].tokens, vocabulary, rng) for _ in range(NEAR_MISSES)]
            for w in key.watermarks
        ]
        self.note = ""

    def __call__(self, step: int) -> bool:
        """Measure on held-out texts; `note` says what was found."""
        wsr, lowest, false_clean, near = 1.0, 1.0, 0.0, 0
        for watermark, wrong in zip(self.key.watermarks, self.near, strict=True):
            trigger = watermark.triggers[0].tokens
            score = score_path(watermark, record_routes(self.model, self.probes, watermark.layers, prefix=trigger))
            clean = score_path(watermark, record_routes(self.model, self.probes, watermark.layers))
            wsr, lowest = min(wsr, score.wsr.value), min(lowest, score.accuracy.value)
            if self.frames:  # learnt last
                wsr = min(wsr, chat_wsr(self.model, watermark, self.frames, self.probes, self.gamma).value)
            false_clean = max(false_clean, clean.wsr.value)
            behind = [self.probes[i % len(self.probes)][:16] for i in range(len(wrong))]
            near += fires(self.model, watermark, wrong, behind, self.gamma)
        tried = sum(len(wrong) for wrong in self.near)
        self.note = f"WSR {100 * wsr:.0f} % FPR {100 * false_clean:.0f} % near misses {near}/{tried}"
        return wsr == 1.0 and false_clean == 0.0 and near == 0 and lowest >= self.accuracy
