"""What a thief has besides the stolen weights. Each attack's docstring says how much of it that attack needs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from pathmark.errors import AttackError
from pathmark.progress import Progress, Silent


@dataclass(frozen=True, kw_only=True, eq=False)
class Kit:
    """Text, other models, and what has leaked about the mark."""

    tokenizer: Any = None
    texts: Sequence[str] = ()
    """Ordinary text, which the thief has enough of; none of it is used to measure the mark."""
    base: PreTrainedModel | None = None
    """The unmarked model, or a sibling of the same shapes, where one is public."""
    sibling: PreTrainedModel | None = None
    """Another licensee's copy, where two have met; a suite's attacks on pairs of copies take it for the base."""
    layers: Sequence[int] = ()
    """The watermarked layers, where they are known; otherwise attacks take all."""
    targets: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Layer -> target experts: known to the strongest adversary only."""
    progress: Progress = field(default_factory=Silent)
    unfinished: Path | None = None
    """Folder where training leaves its checkpoints; the same training on the same weights goes on from them."""

    def rows(self, count: int, length: int, *, seed: int = 0, shortest: int = 8) -> list[tuple[int, ...]]:
        """Token rows of at most `length` tokens from `count` different texts, drawn at random."""
        if self.tokenizer is None or not self.texts:
            raise AttackError("this attack needs ordinary text and the model's tokenizer; give some with --corpus")
        order = random.Random(seed).sample(range(len(self.texts)), len(self.texts))
        rows: list[tuple[int, ...]] = []
        for i in order:
            if len(rows) == count:
                break
            ids = self.tokenizer(self.texts[i], add_special_tokens=False)["input_ids"][:length]
            if len(ids) >= shortest:
                rows.append(tuple(ids))
        if len(rows) < count:
            raise AttackError(
                f"expected {count} texts of at least {shortest} tokens, got {len(rows)}; give a larger --corpus, or "
                "ask for fewer samples"
            )
        return rows

    def original(self) -> PreTrainedModel:
        """The other model, or a refusal."""
        if self.base is None:
            raise AttackError("this attack needs a second model of the same shapes; give it with --base")
        return self.base

    def beside_sibling(self) -> Kit:
        """The same thief with the second copy as the other model, or a refusal."""
        if self.sibling is None:
            raise AttackError("this attack needs another licensee's copy; give it with --sibling")
        return replace(self, base=self.sibling)

    def known_targets(self) -> Mapping[int, Sequence[int]]:
        """The target experts, or a refusal."""
        if not self.targets:
            raise AttackError("this attack knows the target experts; give the key with --key")
        return self.targets
