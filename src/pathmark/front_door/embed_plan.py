"""What an owner may ask of `embed`, and the trainer's configs that it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal

from pathmark.embedding import EmbedConfig, RepliesConfig, default_config
from pathmark.embedding.config import Train
from pathmark.errors import EmbeddingError
from pathmark.models import ModelReport, bundled_probes, bundled_segments
from pathmark.models.devices import Placement
from pathmark.models.texts import Texts, given_texts, split_held_out
from pathmark.release.marking import MarkingConfig
from pathmark.release.scan import ScanConfig
from pathmark.training.parallel import Wrapper


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
    scan: ScanConfig = field(default_factory=ScanConfig)
    """Prefixes that the check tries."""
    placement: Placement = field(default_factory=Placement)
    """Where it runs, and how wide weights are that are not trained."""
    parallel: Wrapper = "none"
    """How the processes that torchrun started train together; none for a single one."""
    recompute: bool = False
    """Keep nothing that layers compute for the backward pass: less memory, a third more time."""
    stream: Literal["auto", "always", "never"] = "auto"
    """Leave on disk what does not change; auto does so when the weights need more than half of the free memory."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise EmbeddingError("give either --steps or --epochs, got both")

    def split_texts(self) -> tuple[list[str], list[str]]:
        """(training, held-out)."""
        if self.texts is None:
            return list(bundled_segments()), list(bundled_probes())
        return split_held_out(given_texts(self.texts), self.n_held_out)

    def marking(self, n_texts: int, report: ModelReport, watermarks: int = 1) -> MarkingConfig:
        """Everything that marking a folder needs to know."""
        training = self.training_config(n_texts, report.hidden_size, watermarks)
        return MarkingConfig(
            embedding=training if self.phase == 1 else None,
            replies=self.replies_config(training) if self.black_box or self.phase == 2 else None,
            delta=self.delta,
            resume=self.resume,
            n_probes=self.n_held_out,
            scan=self.scan,
            placement=self.placement,
            parallel=self.parallel,
            stream=self.stream,
            trust_remote_code=self.trust_remote_code,
        )

    def training_config(self, n_texts: int, hidden_size: int, watermarks: int = 1) -> EmbedConfig:
        """The plan over the defaults of its objective."""
        config = default_config(self.objective, hidden_size, watermarks)
        used = min(n_texts, self.n_texts or config.texts)
        steps = self.steps or config.loop.steps
        if self.epochs is not None:
            steps = self.epochs * -(-used // self.batch_size)
        asked = {name: getattr(self, name) for name in ("margin", "route_weight", "stealth_weight", "temperature")}
        asked = {name: value for name, value in asked.items() if value is not None}
        if foreign := asked.keys() - {setting.name for setting in fields(config.objective)}:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(foreign))
            raise EmbeddingError(f"{named} has no meaning for the {self.objective} objective; leave it out")
        try:
            return replace(
                config,
                objective=replace(config.objective, **asked),
                data=replace(config.data, seq_len=self.seq_len),
                loop=replace(
                    config.loop,
                    steps=steps,
                    lr=config.loop.lr if self.lr is None else self.lr,
                    seed=self.seed,
                    recompute=self.recompute,
                ),
                train=self.train or config.train,
                batch_size=self.batch_size,
                texts=used,
            )
        except ValueError as error:
            raise EmbeddingError(str(error)) from error

    def replies_config(self, training: EmbedConfig) -> RepliesConfig:
        """Settings of the second phase: the first one's seed and length of rows, and its learning rate halved."""
        loop = RepliesConfig().loop
        loop = replace(loop, steps=self.mark_steps or loop.steps, lr=training.loop.lr / 2, seed=self.seed)
        return RepliesConfig(seq_len=self.seq_len, loop=loop)
