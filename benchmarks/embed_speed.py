"""Time to a mark that works, and to one that clean text can afford, against the reference procedure, in one run.

Two goals on 100 held-out texts: WSR >= 99 % and false positives <= 1 %; and clean perplexity within the bound of a
release besides. The reference is the procedure of the paper's authors as far as it is described: LoRA r=8 on the gate
and q, k, v of all layers, the whole model forward and backward in every step, the paper's losses, the best learning
rate of a small sweep. Only training (and our cache) is timed, not the checks.

python benchmarks/embed_speed.py --limit 300
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from marked import bundled_header, fixed_key
from pathmark.embedding import PaperConfig, Trainer, default_config
from pathmark.embedding.paper import paper_route_loss
from pathmark.keys import OwnerKey
from pathmark.models import (
    bundled_probes,
    bundled_segments,
    load_model,
    load_tokenizer,
    pad_rows,
    perplexity,
    record_routing,
)
from pathmark.release.selfcheck import MAX_CLEAN_PPL
from pathmark.results import Header, write_result
from pathmark.training import LoopConfig, run_loop
from pathmark.verification import encode_probes, record_routes, score_path

FORMAT, VERSION = "pathmark-embed-speed", 2
RESULT = Path(__file__).parent / "results" / "embed_speed.json"
CHECK_EVERY = 10
MOST_PPL = MAX_CLEAN_PPL - 1
"""Of a copy that is fit for release."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where a training is after so many steps and seconds."""

    step: int
    seconds: float
    wsr: float
    fpr: float
    ppl_change: float
    """Of clean text, as a share of the original's."""

    @property
    def works(self) -> bool:
        """The first goal."""
        return self.wsr >= 0.99 and self.fpr <= 0.01

    @property
    def fit(self) -> bool:
        """The second one."""
        return self.works and self.ppl_change <= MOST_PPL


Run = tuple[Point, ...]


def first(run: Run, goal: Callable[[Point], bool]) -> Point | None:
    """When a run is where it should be."""
    return next((point for point in run if goal(point)), None)


@dataclass(frozen=True, kw_only=True)
class EmbedSpeed:
    """Both procedures on the way to a mark that works."""

    header: Header
    threads: int
    limit: float
    ours: tuple[Point, ...]
    reference: Mapping[str, tuple[Point, ...]]
    """By learning rate."""

    def best(self, goal: Callable[[Point], bool]) -> Point | None:
        """The reference's, at the rate that gets there first."""
        found = [point for run in self.reference.values() if (point := first(run, goal)) is not None]
        return min(found, key=lambda point: point.seconds, default=None)


class Stopwatch:
    """Time that runs only while nothing is being checked."""

    def __init__(self) -> None:
        self.total, self.since = 0.0, time.perf_counter()

    def pause(self) -> None:
        self.total += time.perf_counter() - self.since

    def go(self) -> None:
        self.since = time.perf_counter()


def measured(model, key: OwnerKey, probes) -> tuple[float, float, float]:
    watermark = key.watermarks[0]
    trigger = watermark.triggers[0].tokens
    wsr = score_path(watermark, record_routes(model, probes, watermark.layers, prefix=trigger)).wsr.value
    fpr = score_path(watermark, record_routes(model, probes, watermark.layers)).wsr.value
    return wsr, fpr, perplexity(model, probes).value


class Enough(Exception):  # noqa: N818  leaves the training loop, is not an error
    """Both goals are reached, or the time is up."""


def timed_check(model, key, probes, watch: Stopwatch, limit: float, log: list[Point]) -> Callable[[int, object], None]:
    watch.pause()
    before = perplexity(model, probes).value
    watch.go()

    def check(step: int, losses: object) -> None:
        if step % CHECK_EVERY:
            return
        watch.pause()
        wsr, fpr, ppl = measured(model, key, probes)
        log.append(Point(step=step, seconds=watch.total, wsr=wsr, fpr=fpr, ppl_change=ppl / before - 1))
        print(log[-1], flush=True)
        watch.go()
        if log[-1].fit or watch.total > limit:
            raise Enough

    return check


def ours(key, probes, limit: float) -> list[Point]:
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    model.set_experts_implementation("grouped_mm")
    log: list[Point] = []
    watch = Stopwatch()
    trainer = Trainer(model, tokenizer, key, bundled_segments(), default_config().build())
    with suppress(Enough):
        trainer.run(after=timed_check(model, key, probes, watch, limit, log))
    return log


def reference(key, probes, lr: float, limit: float) -> list[Point]:
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    model.set_experts_implementation("grouped_mm")
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj"], target_parameters=["mlp.gate.weight"]
    )
    wrapped = get_peft_model(model, lora)
    watermark = key.watermarks[0]
    trigger, objective = watermark.triggers[0].tokens, PaperConfig()
    rows = [tokenizer(text)["input_ids"][:128] for text in bundled_segments()]

    def step_loss(step: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        chosen = torch.randint(len(rows), (8,), generator=generator).tolist()
        share = np.random.default_rng(int(torch.randint(2**31, (1,), generator=generator))).beta(2, 5)
        triggered = min(7, max(1, int(8 * share)))
        ids = [(*trigger, *rows[i]) if n < triggered else tuple(rows[i]) for n, i in enumerate(chosen)]
        ids_BT, mask_BT = pad_rows(ids, 0)
        labels_BT = ids_BT.masked_fill(mask_BT == 0, -100)
        with record_routing(wrapped, watermark.layers, gradients=True) as trace:
            language = wrapped(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT, use_cache=False).loss
        routing = {layer: trace[layer].probs_BTE for layer in watermark.layers}
        marked_BT = torch.full_like(ids_BT, -1)
        marked_BT[:triggered] = 0
        marked_BT[mask_BT == 0] = -1
        free_BT = (marked_BT < 0) & mask_BT.bool()
        terms = paper_route_loss(routing, [watermark.path], marked_BT, free_BT, objective.temperature)
        terms["loss"] = language + terms["align"] + objective.stealth_weight * terms["stealth"]
        return terms

    parameters = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    log: list[Point] = []
    config = LoopConfig(steps=default_config().loop.steps, lr=lr)  # warm-up and decay as ours
    with suppress(Enough):
        run_loop(parameters, step_loss, config, progress=timed_check(wrapped, key, probes, Stopwatch(), limit, log))
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=300, help="seconds of training per procedure")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 4e-3, 1.6e-2])
    args = parser.parse_args()
    key = fixed_key(0)
    probes = encode_probes(load_tokenizer("bundled:tiny"), bundled_probes(), n_probes=100, length=128)
    mine = tuple(ours(key, probes, args.limit))
    theirs = {str(lr): tuple(reference(key, probes, lr, args.limit)) for lr in args.rates}
    result = EmbedSpeed(
        header=bundled_header(FORMAT, VERSION, key=key.fingerprint, settings={"config": repr(default_config())}),
        threads=torch.get_num_threads(),
        limit=args.limit,
        ours=mine,
        reference=theirs,
    )
    write_result(RESULT, result)
    RESULT.chmod(0o644)


if __name__ == "__main__":
    main()
