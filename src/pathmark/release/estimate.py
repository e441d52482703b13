"""What an embedding would take, from a short piece of it on the real model: time, memory and disk."""

from __future__ import annotations

import random
import resource
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
from pathmark.models.tokenization import ordinary_tokens
from pathmark.progress import Progress, Silent
from pathmark.release.copies import further_loop
from pathmark.release.fidelity import measure
from pathmark.release.marking import MarkingConfig, Texts
from pathmark.release.scan import strange_prefixes
from pathmark.verification import encode_probes

TRIED_STEPS = 12
"""Two rounds of rows of every size."""
TRIED_PROBES = 4
PASSES, PASSES_OF_CHECK = 2, 5
"""How often a text goes through the model: routing and perplexity; in a check also rounded, in chats and for the id."""


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
    _, codec, _ = describe_model(str(base), trust_remote_code=config.trust_remote_code)
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
    per_row = (prepared - began) / len(trainer.kept_rows())
    rows = trainer.kept_rows(embedding.loop)
    per_step = (trained - prepared) / TRIED_STEPS
    per_token = measured / (PASSES * (1 + len(key.watermarks)) * TRIED_PROBES * config.probe_tokens)
    check = per_token * _checked_tokens(key, codec.tokenizer, config)
    before = per_token * PASSES * (1 + len(key.watermarks)) * config.n_probes * config.probe_tokens
    whole = before + per_row * len(rows) + per_step * embedding.loop.steps + check
    tokens = sum(len(trainer.context.rows[i].ids) for i in rows)
    size = sum(path.stat().st_size for path in base.rglob("*") if path.is_file())
    changed = sum(p.numel() * 4 for p in trainer.objective.parameters(trainer.context).values())
    return Estimate(
        copies=copies,
        first_seconds=whole,
        further_seconds=per_step * further_loop(embedding.loop).steps + check,
        memory_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        + trainer.context.cache.bytes_per_token * tokens,
        disk_bytes=copies * (changed if config.delta else size),
    )


def _checked_tokens(key: OwnerKey, tokenizer: Any, config: MarkingConfig) -> int:
    """Tokens that a self-check runs through the model: probes in every form, and the scanned prefixes."""
    trigger, scan = key.watermarks[0].triggers[0].tokens, config.scan
    strangers = strange_prefixes(trigger, ordinary_tokens(tokenizer), scan, random.Random(0))
    near = (len(trigger) + scan.at_the_edge) * scan.per_count
    scanned = sum(len(prefix) + scan.text_tokens for prefixes in strangers.values() for prefix in prefixes)
    rows = PASSES_OF_CHECK * (1 + len(key.watermarks)) * config.n_probes
    return rows * (config.probe_tokens + len(trigger)) + scanned + near * (len(trigger) + scan.text_tokens)


def _minutes(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
