"""What a thief has besides the stolen weights. Each attack's docstring says how much of it that attack needs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel

from pathmark.errors import AttackError
from pathmark.keys import OwnerKey
from pathmark.progress import Progress, Silent
from pathmark.training.parallel import Wrapper


class Embedding(Protocol):
    """How a thief puts a mark of its own in: trains the model in place and says how many steps that took."""

    def __call__(
        self, model: PreTrainedModel, tokenizer: Any, key: OwnerKey, texts: Sequence[str], how: EmbeddingRun
    ) -> int:
        """Raises TrainingError where the training breaks, CheckpointError where a checkpoint is another run's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingRun:
    """One such training."""

    objective: str
    """anchored or paper."""
    lr_factor: float
    """Of the rate that an owner of this objective would take."""
    seed: int
    epochs: int
    """Passes over the triggered rows."""
    reckless: bool
    """Without the care that an owner takes of clean text."""
    checkpoint: Path | None
    """Where an interrupted training goes on from."""
    progress: Progress


@dataclass(frozen=True, kw_only=True, eq=False)
class Kit:
    """Text, other models, and what has leaked about the mark."""

    tokenizer: Any = None
    texts: Sequence[str] = ()
    """Ordinary text, which the thief has enough of; none of it is used to measure the mark."""
    original: PreTrainedModel | None = None
    """The unmarked model, or another of the same shapes, where one is public."""
    sibling: PreTrainedModel | None = None
    """Another licensee's copy, where two have met; a suite's attacks on pairs of copies take it for the original."""
    layers: Sequence[int] = ()
    """The watermarked layers, where they are known; otherwise attacks take all."""
    targets: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Layer -> target experts: known to the strongest adversary only."""
    embed: Embedding | None = None
    """The scheme itself, for a thief who has this package too."""
    progress: Progress = field(default_factory=Silent)
    parallel: Wrapper = "none"
    """How several processes train together."""
    unfinished: Path | None = None
    """Folder where training leaves its checkpoints; the same training on the same weights goes on from them."""

    def rows(self, count: int, length: int, *, seed: int = 0, shortest: int = 8) -> list[tuple[int, ...]]:
        """Token rows of at most `length` tokens from `count` different texts, drawn at random."""
        return [ids[:length] for _, ids in self._drawn(count, seed=seed, shortest=shortest)]

    def rows_up_to(self, length: int) -> list[tuple[int, ...]]:
        """All texts as token rows, cut to `length`."""
        rows = (tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in self.texts)
        return [ids[:length] for ids in rows if len(ids) > 1]

    def long_texts(self, count: int, *, seed: int = 0, shortest: int) -> list[str]:
        """The same draw of so many texts, as text."""
        return [text for text, _ in self._drawn(count, seed=seed, shortest=shortest)]

    def _drawn(self, count: int, *, seed: int, shortest: int) -> list[tuple[str, tuple[int, ...]]]:
        if self.tokenizer is None or not self.texts:
            raise AttackError("this attack needs ordinary text and the model's tokenizer; give some with --texts")
        order = random.Random(seed).sample(range(len(self.texts)), len(self.texts))
        found: list[tuple[str, tuple[int, ...]]] = []
        for i in order:
            if len(found) == count:
                break
            ids = tuple(self.tokenizer(self.texts[i], add_special_tokens=False)["input_ids"])
            if len(ids) >= shortest:
                found.append((self.texts[i], ids))
        if len(found) < count:
            raise AttackError(
                f"expected {count} texts of at least {shortest} tokens, got {len(found)}; give more with --texts, or "
                "ask for fewer samples"
            )
        return found

    def second_model(self) -> PreTrainedModel:
        """The other model, or a refusal."""
        if self.original is None:
            raise AttackError("this attack needs a second model of the same shapes; give it with --original")
        return self.original

    def embedding(self) -> Embedding:
        """How to put a mark in, or a refusal."""
        if self.embed is None:
            raise AttackError("this attack embeds a key; give the kit an `embed` (pathmark.evaluate.thief)")
        return self.embed

    def beside_sibling(self) -> Kit:
        """The same thief with the second copy as the other model, or a refusal."""
        if self.sibling is None:
            raise AttackError("this attack needs another licensee's copy; give it with --sibling")
        return replace(self, original=self.sibling)

    def known_targets(self) -> Mapping[int, Sequence[int]]:
        """The target experts, or a refusal."""
        if not self.targets:
            raise AttackError("this attack knows the target experts; give the key with --key")
        return self.targets
