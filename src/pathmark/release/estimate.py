"""What an embedding would take on this machine: the counts of release/plan.py, at the speed of a short piece of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from pathmark.embedding import Trainer
from pathmark.errors import EmbeddingError
from pathmark.keys import OwnerKey
from pathmark.models import local_folder
from pathmark.models.describe import describe_model
from pathmark.models.devices import open_model
from pathmark.models.loading import use_fast_experts
from pathmark.progress import Progress, Silent
from pathmark.release.copies import further_loop
from pathmark.release.fidelity import measure
from pathmark.release.marking import MarkingConfig, Texts
from pathmark.release.plan import Devices, checked_tokens, plan_embedding
from pathmark.verification import encode_probes

TRIED_STEPS = 12
"""Two rounds of rows of every size."""
TRIED_PROBES = 4
PASSES = 2
"""How often a text goes through the model that is measured: routing and perplexity."""


@dataclass(frozen=True)
class Estimate:
    """What so many copies would take."""

    copies: int
    first_seconds: float
    further_seconds: float
    """Of each copy after the first."""
    memory_bytes: int
    disk_bytes: int

    @property
    def seconds(self) -> float:
        """Of all."""
        return self.first_seconds + (self.copies - 1) * self.further_seconds

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark embed --estimate --json`."""
        return {**vars(self), "seconds": self.seconds}

    def words(self) -> str:
        """One sentence for people."""
        several = f" {self.copies} copies" if self.copies > 1 else " one copy"
        each = f" ({_minutes(self.first_seconds)} for the first, {_minutes(self.further_seconds)} for each further one)"
        return (
            f"About {_minutes(self.seconds)} for{several}{each if self.copies > 1 else ''}, "
            f"{self.memory_bytes / 1e9:.1f} GB of memory and {self.disk_bytes / 1e9:.2f} GB of disk, measured on a few "
            "steps. Nothing was written."
        )


def estimate(
    source: str,
    key: OwnerKey,
    texts: Texts,
    config: MarkingConfig,
    *,
    copies: int = 1,
    progress: Progress | None = None,
) -> Estimate:
    """Run a few steps and measure on a few texts, on this machine as busy as it is now; nothing is written."""
    embedding = config.embedding
    if embedding is None or embedding.train == "lora":
        raise EmbeddingError("an estimate is made for the embedding of paths without adapters")
    say = progress or Silent()
    base = local_folder(source)
    say.stage("loading", None)
    model = open_model(base, config.placement, trust_remote_code=config.trust_remote_code)
    use_fast_experts(model)
    _, codec, report = describe_model(str(base), trust_remote_code=config.trust_remote_code)
    short = replace(embedding, loop=replace(embedding.loop, steps=TRIED_STEPS))
    say.stage("a few steps", None)
    began = time.monotonic()
    trainer = Trainer(model, codec.tokenizer, key, texts.training, short.build())
    prepared = time.monotonic()
    trainer.run()
    trained = time.monotonic()
    probes = encode_probes(codec.tokenizer, texts.probes, n_probes=TRIED_PROBES, length=config.probe_tokens)
    measure(model, key, probes)
    measured = time.monotonic() - trained
    watermarks, width = len(key.watermarks), max(len(t) for w in key.watermarks for t in w.path.values())
    rows, texts_per_pass = trainer.kept_rows(embedding.loop), PASSES * (1 + watermarks)
    trigger = len(key.watermarks[0].triggers[0].tokens)
    check = checked_tokens(
        report.vocabulary, n_probes=config.n_probes, length=config.probe_tokens + trigger, watermarks=watermarks,
        trigger=trigger, scan=config.scan,
    )  # fmt: skip
    before = texts_per_pass * config.n_probes * config.probe_tokens
    devices = Devices(weight_bytes=next(model.parameters()).element_size())
    job = plan_embedding(report.sizes, key.layers, embedding, devices, width=watermarks * width, checked=check + before)
    # what was run stands in the same counts to what would be: only the rates are measured
    per_step = (trained - prepared) / TRIED_STEPS
    per_check = measured / (texts_per_pass * TRIED_PROBES * config.probe_tokens)
    lower = (prepared - began) / len(trainer.kept_rows()) * len(rows)
    size = sum(path.stat().st_size for path in base.rglob("*") if path.is_file())
    changed = sum(p.numel() * 4 for p in trainer.objective.parameters(trainer.context).values())
    return Estimate(
        copies=copies,
        first_seconds=lower + per_step * embedding.loop.steps + per_check * (check + before),
        further_seconds=per_step * further_loop(embedding.loop).steps + per_check * check,
        memory_bytes=job.memory
        + trainer.context.cache.bytes_per_token * sum(len(trainer.context.rows[i].ids) for i in rows),
        disk_bytes=copies * (changed if config.delta else size),
    )


def _minutes(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
