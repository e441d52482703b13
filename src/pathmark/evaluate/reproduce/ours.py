"""Experiments on our mark alone: replies, several watermarks, latency, and the paper's ablations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial

import numpy as np

from pathmark.attacks import Kit, find_attack
from pathmark.evaluate.expert_parallel import (
    PAPER_OVERHEAD,
    QWEN_MOE,
    Hardware,
    SyntheticRouting,
    record_twins,
    simulate_routes,
)
from pathmark.evaluate.reproduce.bench import OURS, Bench, Copy
from pathmark.evaluate.reproduce.marks import percent
from pathmark.evaluate.reproduce.recipes import Recipe
from pathmark.evaluate.reproduce.robustness import THIEF, scaled
from pathmark.evaluate.reproduce.running import Cell, Figure
from pathmark.evaluate.several import crossings, read_marks, total
from pathmark.models import perplexity
from pathmark.release.replies import ReplyCheck, ReplyConfig, reply_check
from pathmark.stats import Rate
from pathmark.verification import decode_id, record_evidence, record_routes, score_path, verify_model

DEVICES = 8
SERIES_PAPER = "paper's recipe"
TUNED_RATE = 1e-3
"""Of all weights at width 128, in the ablation after fine-tuning: what left the thief the best model on its own text in
the sweep of docs/robustness.md."""
TUNED_SAMPLES = 500
ONE = "one model"
WEIGHT_EPOCHS = 5
"""The paper trains half as long where it varies the routing loss."""


def blackbox(bench: Bench) -> Iterable[Cell]:
    """The trigger alone, almost-triggers, ordinary prompts, and the trigger before a question."""
    asks = bench.pick(ReplyConfig(), ReplyConfig(trials=10, near_misses=10, ordinary=10, queries=10))

    @cache
    def replies(marked: bool, key: int) -> ReplyCheck:
        copy = bench.ours(key, Recipe(replies=True))
        model = copy.model if marked else bench.original
        return reply_check(model, bench.tokenizer, copy.key, bench.probes(), asks)

    places = {
        "trigger alone": "trials", "almost the trigger": "near_misses", "ordinary prompts": "ordinary",
        "trigger before a text": "queries",
    }  # fmt: skip

    def rate(marked: bool, key: int, name: str) -> Mapping[str, Figure]:
        found: Rate = getattr(replies(marked, key), name)
        return {"match rate": found}

    for key in range(bench.keys):
        for series, marked in (("marked", True), ("original", False)):
            for place, name in places.items():
                yield Cell(series, place, key, partial(rate, marked, key, name))


def many(bench: Bench) -> Iterable[Cell]:
    """From one watermark to sixteen."""
    for count in bench.pick((1, 2, 4, 8, 16), (1, 2)):
        yield Cell(OURS, str(count), 0, partial(_together, bench, count))


def _together(bench: Bench, count: int) -> Mapping[str, Figure]:
    copy = bench.ours(0, Recipe(watermarks=count, pool="all"))
    read = read_marks(copy.model, copy.key, bench.probes())
    crossed: dict[str, Figure] = {} if count == 1 else {"crossed": read.crossed}
    return {
        "WSR": total(read.wsr), "weakest WSR": min(read.wsr, key=lambda rate: rate.value), **crossed,
        "false positives": read.clean, "largest log10 p": max(p.log10 for p in read.p), "ids": read.ids_right,
        "change of PPL, %": _change(bench, copy),
    }  # fmt: skip


def _change(bench: Bench, copy: Copy) -> float:
    return percent(*(perplexity(model, bench.probes()).value for model in (bench.original, copy.model)))


def real_case(bench: Bench) -> Iterable[Cell]:
    """Two watermarks, each with its barcode."""
    recipe = Recipe(watermarks=2, pool="all")

    def watermark(place: int) -> Mapping[str, Figure]:
        copy = bench.ours(0, recipe)
        evidence = record_evidence(copy.model, copy.key, bench.probes(), aligned=False)
        mark = copy.key.watermarks[place]
        read = decode_id(mark, evidence.measure(mark, place))
        path = [digit for digit in read.digits if digit is not None]
        # a path with a layer missing is no barcode
        drawn: dict[str, Figure] = {"path": path} if len(path) == len(read.digits) else {}
        return {
            "WSR": score_path(mark, evidence.triggered[place]).wsr,
            "crossed": total(crossings(evidence, copy.key, place)),
            "id read right": Rate(int(read.id == mark.id), 1),
            "path as embedded": Rate(int(tuple(path) == tuple(mark.group_indices)), 1),
            **drawn,
        }

    for place in range(recipe.watermarks):
        yield Cell(f"watermark {place + 1}", ONE, 0, partial(watermark, place))
    yield Cell(ONE, ONE, 0, lambda: {"change of PPL, %": _change(bench, bench.ours(0, recipe))})


def latency(bench: Bench) -> Iterable[Cell]:
    """Made-up routing in the shape of the paper's model, and what our marked model really does."""
    deployment = Hardware().deployment(QWEN_MOE, DEVICES)

    def synthetic(marked: int) -> Mapping[str, Figure]:
        found = SyntheticRouting().overheads(marked, deployment, keys=bench.pick(40, 3))
        low, high = np.quantile(found, (0.05, 0.95))
        return {
            "overhead, %": 100 * float(np.median(found)), "5 % of keys below": 100 * float(low),
            "5 % of keys above": 100 * float(high),
        }  # fmt: skip

    def recorded(key: int) -> Mapping[str, Figure]:
        copy = bench.ours(key)
        triggered, clean, experts = record_twins(copy.model, copy.key, bench.described[1], bench.probes())
        return {"overhead, %": 100 * simulate_routes(triggered, clean, experts, deployment).value}

    for marked in PAPER_OVERHEAD:
        yield Cell("made-up routing", str(marked), 0, partial(synthetic, marked))
    for key in range(bench.keys):
        place = f"{len(bench.layers)} of {len(bench.routed)} layers"
        yield Cell("recorded routing", place, key, partial(recorded, key))


def width_and_layers(bench: Bench) -> Iterable[Cell]:
    """Path width against number of layers, after 4 bits and 3 epochs."""
    widths, counts = bench.pick(((1, 2, 4, 8), (1, 2, 4, 6)), ((1, 2), (1, 2)))
    experts = min(facts.experts for facts in bench.described[2].routed)
    for width in widths:
        for count in counts:
            if count < len(bench.routed) and 2 * width <= experts:
                place = f"{count} layer{'s' * (count > 1)}"
                yield Cell(f"k = {width}", place, 0, partial(_ablated, bench, width, count))


def _ablated(bench: Bench, width: int, count: int) -> Mapping[str, Figure]:
    copy = bench.ours(0, Recipe(width=width, layers=count, pool="all"))
    mark, probes = copy.key.watermarks[0], bench.probes()
    before = verify_model(copy.model, copy.key, probes)
    fpr = score_path(mark, record_routes(copy.model, probes, mark.layers)).wsr
    kit = Kit(tokenizer=bench.tokenizer, texts=bench.texts(THIEF).training, progress=bench.progress)
    samples = bench.pick(TUNED_SAMPLES, 64)
    model = copy.model
    for name, settings in (
        ("rtn", {"bits": 4, "routers": True}),
        ("fine-tune", {"samples": samples, "epochs": 3, "lr": scaled(bench, TUNED_RATE), "length": bench.size.tokens}),
    ):
        attack = find_attack(name)
        model = attack.run(model, attack.configure(**settings), kit).model
    after = verify_model(model, copy.key, probes)
    return {
        "WSR": after.wsr, "false positives": fpr, "PPL": perplexity(model, probes).value, "log10 p": after.p.log10,
        "WSR before": before.wsr, "PPL before": perplexity(copy.model, probes).value,
    }  # fmt: skip


def route_weight(bench: Bench) -> Iterable[Cell]:
    """The paper's recipe with other weights of its routing loss."""
    for weight in bench.pick((0.1, 0.5, 1.0, 2.0, 3.0, 5.0), (0.1, 1.0, 5.0)):
        yield Cell(SERIES_PAPER, f"{weight:g}", 0, partial(_weighed, bench, weight))


def _weighed(bench: Bench, weight: float) -> Mapping[str, Figure]:
    copy = bench.ours(0, Recipe(objective="paper", route_weight=weight, epochs=WEIGHT_EPOCHS))
    mark, probes = copy.key.watermarks[0], bench.probes()
    clean = score_path(mark, record_routes(copy.model, probes, mark.layers)).wsr
    return {
        "WSR": verify_model(copy.model, copy.key, probes).wsr, "false positives": clean,
        "PPL": perplexity(copy.model, probes).value, "change of PPL, %": _change(bench, copy),
    }  # fmt: skip
