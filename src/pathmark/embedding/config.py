"""Settings of an embedding that every objective shares."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

from pathmark.embedding.data import DataConfig
from pathmark.embedding.objective import Objective
from pathmark.training import LoopConfig

Train = Literal[
    "router", "router+attention", "router+attention+targets", "router+attention+experts", "lora", "all"
]  # fmt: skip


class ObjectiveConfig(Protocol):
    """Settings of one objective: a dataclass that builds it."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def build(self, config: EmbedConfig) -> Objective:
        """The objective with these settings, for a run with those."""


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """Everything that decides what an embedding does, and nothing secret."""

    objective: ObjectiveConfig
    """What the model is taught, with the weights of its loss terms."""
    loop: LoopConfig
    """Steps, rate and seed; rows and batches come of the seed too."""
    data: DataConfig = field(default_factory=DataConfig)
    """Which rows are drawn."""
    train: Train = "router+attention+targets"
    """Parts of the watermarked layers that change; of the experts the targets alone, unless all are asked for. Few
    clean tokens visit the targets, and what they write tells the layers above them that the trigger was there."""
    batch_size: int = 16
    """Rows per step, of the normal length."""
    texts: int = 600
    """Texts to use of the corpus."""

    def __post_init__(self) -> None:
        if self.batch_size < 3:
            raise ValueError(f"batch_size must be at least 3, one row of each kind, got {self.batch_size}")

    def shaped(self, *, steps: int, batch_size: int, seq_len: int, recompute: bool = False) -> EmbedConfig:
        """The same with another number, count and length of rows."""
        return replace(
            self,
            data=replace(self.data, seq_len=seq_len),
            loop=replace(self.loop, steps=steps, recompute=recompute),
            batch_size=batch_size,
        )

    def build(self) -> Objective:
        """The objective, ready for a trainer."""
        return self.objective.build(self)
