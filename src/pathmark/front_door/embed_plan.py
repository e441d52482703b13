"""What an owner may ask of `embed`, and the trainer's configs that it comes to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pathmark.embedding import EmbedConfig, MarkConfig, default_config
from pathmark.embedding.embedder import Train
from pathmark.errors import EmbeddingError
from pathmark.models import bundled_probes, bundled_segments
from pathmark.models.texts import Texts, given_texts, split_held_out
from pathmark.release.scan import ScanConfig


@dataclass(frozen=True, kw_only=True)
class EmbedPlan:
    """How to embed. None stands for the objective's own default."""

    id: int | None = None
    """Mark a licensee's copy with this id instead of the key's own."""
    texts: Texts | None = None
    """Texts to train and to check on: a file, a folder or the texts themselves. None: the bundled ones."""
    n_texts: int | None = None
    """How many training texts to use."""
    n_held_out: int = 100
    """Texts that nobody trains on, to check on; of given texts at most a tenth."""
    objective: Literal["anchored", "paper"] = "anchored"
    """Keep natural routing by the original model, or the paper's Algorithm 1."""
    margin: float | None = None
    route_weight: float | None = None
    stealth_weight: float | None = None
    temperature: float | None = None
    steps: int | None = None
    epochs: int | None = None
    """Instead of steps: passes over the training texts."""
    batch_size: int = 16
    seq_len: int = 128
    """Text tokens per row."""
    lr: float | None = None
    train: Train | None = None
    """Parts of the watermarked layers that change."""
    seed: int = 0
    delta: bool = False
    """Write only the changed tensors."""
    resume: bool = False
    """Finish an interrupted run with the same settings."""
    black_box: bool = False
    """Also teach the reply marks: a trigger alone is answered with its mark."""
    phase: Literal[1, 2] = 1
    """2 adds the reply marks to a model that already has the key's paths."""
    mark_steps: int | None = None
    """Steps of the reply marks' phase."""
    scan: ScanConfig | None = None
    """Prefixes that the check tries."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise EmbeddingError("give either --steps or --epochs, got both")

    def split_texts(self) -> tuple[list[str], list[str]]:
        """(training, held-out)."""
        if self.texts is None:
            return list(bundled_segments()), list(bundled_probes())
        return split_held_out(given_texts(self.texts), self.n_held_out)

    def training_config(self, n_texts: int, hidden_size: int) -> EmbedConfig:
        """The plan over the defaults of its objective."""
        config = default_config(self.objective, hidden_size)
        used = min(n_texts, self.n_texts or config.texts)
        steps = self.steps or config.loop.steps
        if self.epochs is not None:
            steps = self.epochs * -(-used // self.batch_size)
        asked = {name: getattr(self, name) for name in ("margin", "route_weight", "stealth_weight", "temperature")}
        try:
            return replace(
                config,
                objective=replace(config.objective, **{name: v for name, v in asked.items() if v is not None}),
                data=replace(config.data, seq_len=self.seq_len),
                loop=replace(
                    config.loop, steps=steps, lr=config.loop.lr if self.lr is None else self.lr, seed=self.seed
                ),
                train=self.train or config.train,
                batch_size=self.batch_size,
                texts=used,
            )
        except ValueError as error:
            raise EmbeddingError(str(error)) from error

    def reply_config(self, training: EmbedConfig) -> MarkConfig | None:
        """Settings of the second phase, where it is asked for: the first one's seed, and its learning rate halved."""
        if not self.black_box and self.phase == 1:
            return None
        marks = MarkConfig()
        steps = self.mark_steps or marks.loop.steps
        return replace(marks, loop=replace(marks.loop, steps=steps, lr=training.loop.lr / 2, seed=self.seed))
