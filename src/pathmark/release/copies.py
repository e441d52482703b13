"""Many licensees' copies of one model: the trigger is learnt once, and every further path starts from there.

What a copy has learnt is mostly to recognise the trigger in front of any text and to stay silent otherwise. In another
licensee's copy the routers' new directions lead to other experts; a few steps make up for what these experts are.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pathmark.embedding import Trainer
from pathmark.errors import EmbeddingError, RanksError
from pathmark.keys import OwnerKey
from pathmark.models.checkpoint import apply_delta
from pathmark.models.devices import open_model
from pathmark.models.ranks import require_alone
from pathmark.progress import Progress, Silent
from pathmark.release.marking import Bench, Marked, MarkingConfig, Spent, Texts, refuse_early, unfinished
from pathmark.training import LoopConfig
from pathmark.training.parallel import Wrapper

FURTHER, GENTLER = 0.3, 0.8
"""Of the first copy's steps and warm-up, and of its learning rate, so much for each further one."""


@dataclass(frozen=True)
class Licence:
    """One licensee's copy."""

    licensee: str
    id: int
    output: Path


def copy_name(licensee: str, id_: int) -> str:
    """A name for a licensee's copy that is a safe file name, and no two licensees' the same."""
    return f"{re.sub(r'[^a-z0-9]+', '-', licensee.lower()).strip('-') or 'licensee'}-{id_}"


def further_loop(loop: LoopConfig) -> LoopConfig:
    """How a further copy is optimised: most of what it needs is there."""
    steps, warmup = (max(1, round(FURTHER * count)) for count in (loop.steps, loop.warmup))
    return replace(loop, steps=steps, warmup=warmup, lr=GENTLER * loop.lr)


def require_one_process(parallel: Wrapper) -> None:
    """Copies for all licensees go on from each other."""
    require_alone("a copy for every licensee (--all)")
    if parallel != "none":
        raise RanksError(
            f"copies for all licensees are trained by one process, expected --parallel none, got {parallel}; "
            "leave it out, or embed copy by copy with --id"
        )


def mark_copies(
    source: str,
    key: OwnerKey,
    licences: Sequence[Licence],
    texts: Texts,
    config: MarkingConfig,
    *,
    amend: Callable[[OwnerKey], None],
    finished: Callable[[Licence, Marked], None],
    progress: Progress | None = None,
) -> None:
    """Mark a copy for everybody who has none yet; `finished` is told of each as soon as it is written.

    `amend` stores the key with what was measured for it, before the first copy appears.

    The first copy that is there, or that is made now, is the start of all others.
    """
    require_one_process(config.parallel)
    config = replace(config, stream="never")  # every copy starts from all weights of the first
    say, embedding = progress or Silent(), config.embedding
    if embedding is None or config.replies is not None or embedding.train == "lora":
        raise EmbeddingError(
            "many copies at once get paths alone, and not by adapters; leave out --black-box, --phase 2 and --train "
            "lora, and teach reply marks to a finished copy with --phase 2"
        )
    there = [licence for licence in licences if licence.output.exists()]
    wanted = [licence for licence in licences if not licence.output.exists()]
    if not wanted:
        return
    refuse_early(source, key, [licence.output for licence in wanted], texts, config)
    bench = Bench.prepare(source, key, texts, config, say)
    amend(bench.amended)
    first = (there or wanted)[0]
    trainer = Trainer(
        bench.model, bench.tokenizer, key.with_id(first.id), texts.training, embedding.build(), progress=say
    )
    start = _weights_of(bench, first.output) if there else {}
    for number, licence in enumerate(wanted, start=1):
        started = time.monotonic()
        own = key.with_id(licence.id)
        say.stage(f"copy {number} of {len(wanted)}: {licence.licensee}", None)
        if start:
            _put_back(bench, start)
            trainer.turn_to(own, further_loop(embedding.loop))
        steps = trainer.run(checkpoint=unfinished(licence.output) / "checkpoint.pt", resume=config.resume).steps
        marked = bench.release(own, licence.output, Spent(steps, started, time.monotonic() - started))
        start = start or {name: p.detach().clone() for name, p in bench.model.named_parameters()}
        finished(licence, marked)


def _weights_of(bench: Bench, output: Path) -> dict[str, torch.Tensor]:
    """The weights of a copy that was finished earlier."""
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".start-") as scratch:
        folder = output
        if bench.config.delta:
            folder = Path(scratch) / "copy"
            apply_delta(bench.base, output, folder)
        model = open_model(folder, bench.config.placement, trust_remote_code=bench.config.trust_remote_code)
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def _put_back(bench: Bench, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in bench.model.named_parameters():
        parameter.copy_(weights[name])
