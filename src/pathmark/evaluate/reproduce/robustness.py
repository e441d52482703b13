"""The paper's attacks, on all schemes that are in the weights: same texts, seeds and budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pathmark.errors import AttackError
from pathmark.evaluate.reproduce.bench import IN_WEIGHTS, OURS, Bench
from pathmark.evaluate.reproduce.marks import percent
from pathmark.evaluate.reproduce.recipes import PAPER_RATE
from pathmark.evaluate.reproduce.running import DESTROYED, Cell, Figure
from pathmark.evaluate.robustness import Suspects
from pathmark.evaluate.scheme_robustness import SchemeSuspects
from pathmark.evaluate.stolen import RobustnessConfig, Sources, Stolen, run_suite
from pathmark.evaluate.suites import PAPER, Case, step
from pathmark.evaluate.thief import make_kit
from pathmark.models.checkpoint import base_digest
from pathmark.results.robustness import Carried, Unmeasured
from pathmark.stats import Rate
from pathmark.training import learning_rate

THIEF = "ptb"
"""Whose text the thief has, as in the paper."""
ALL = (*IN_WEIGHTS, OURS)
RATES: Mapping[str, Sequence[float]] = {"router": (1e-3, 3e-3, 1e-2, 3e-2), "all": (1e-4, 3e-4, 1e-3, 3e-3)}
"""Learning rates at width 128, in inverse proportion elsewhere. The thief tries them on every copy of every scheme, and
takes the one that leaves the best model on its own text."""
TRAINED = {"router": "routers", "all": "all weights"}
SAMPLES, TOKENS = 500, 64
"""Texts that the thief tunes on, and tokens of each."""
TRIED, LONG = 5, 30
"""Epochs at every rate; and of the paper's thief, who tunes routers at the paper's rate."""
SWEEP = (SAMPLES, TOKENS, PAPER_RATE, TRIED, LONG, *RATES.items())


def case(name: str) -> Case:
    """A case of the suite that the whole project measures with."""
    return next(one for one in PAPER if one.name == name)


NONE = case("none")


def _cells(bench: Bench, series: Sequence[str], cases: Sequence[Case], swept: Sequence[Case] = ()) -> Iterable[Cell]:
    """A row for each case; what is only swept, for those at the best rate, gets none."""
    for name in series:
        for key in range(bench.keys):
            for each in (NONE, *cases):
                tried = [other for other in swept if other.name.startswith(each.best_of)] if each.best_of else []
                yield Cell(name, each.name, key, partial(_row, bench, name, key, each, tried))


def _row(bench: Bench, name: str, key: int, wanted: Case, tried: Sequence[Case]) -> Mapping[str, Figure]:
    """What an attack left, at the best of the rates that were tried; experiments share the rows."""
    suspects, sources, problem = bench.once("suspects", (name, key), lambda: _suspects(bench, name, key))
    if problem is not None:
        raise AttackError(problem)
    folder = _folder(bench, name, key)
    result: Any = run_suite(suspects, [NONE, *tried], folder, sources, progress=bench.progress)
    rows = [row for row in result.rows if row.case in {one.name for one in tried}]
    if rows and not any(isinstance(row, Carried) for row in rows):
        refused = [row for row in rows if isinstance(row, Unmeasured) and row.status != "destroyed"]
        if refused:
            raise AttackError(f"{refused[0].status}: {refused[0].reason}")
        raise AttackError("destroyed: every rate that the thief tried left no model to measure")
    planned = wanted.at_best_rate(rows)
    row = next((row for row in rows if row.steps == planned.steps), None)  # the best of the sweep itself
    if row is None:
        result = run_suite(suspects, [NONE, *tried, wanted], folder, sources, progress=bench.progress)
        row = next(row for row in result.rows if row.case == wanted.name)
    if isinstance(row, Unmeasured):
        raise AttackError(f"{row.status}: {row.reason}")
    found: dict[str, Figure] = {"WSR": row.wsr, "log10 p": row.log10_p, "found": Rate(int(row.marked), 1)}
    found |= {"PPL": row.ppl, "PPL against the marked copy, %": percent(row.ppl_before, row.ppl)}
    if row.ppl_thief is not None:
        found["PPL of the thief's text"] = row.ppl_thief
    if getattr(row, "thief_wsr", None) is not None:
        found["thief's WSR"] = row.thief_wsr
    if tried:
        found["learning rate"] = float(row.steps[0].settings["lr"])
    return {**found, DESTROYED: float(row.destroyed)}


def _folder(bench: Bench, name: str, key: int) -> Path:
    """Named like the copy: what marks it differently, or judges it by other texts, is attacked anew."""
    copy = bench.ours(key) if name == OURS else bench.theirs(name, key)
    return bench.folder / "attacked" / copy.folder.name


def _suspects(bench: Bench, name: str, key: int) -> tuple[Stolen[Any], Sources, str | None]:
    """The stolen model, where it is from, and why nothing can be removed from it where its mark is not there."""
    texts = bench.texts(THIEF).training
    config = RobustnessConfig(n_probes=bench.size.probes)
    if name == OURS:
        copy = bench.ours(key)
        kit = make_kit(bench.tokenizer, texts, copy.key, progress=bench.progress)
        stolen: Stolen[Any] = Suspects(copy.model, copy.key, kit, config)
        folder = copy.folder
    else:
        rival = bench.theirs(name, key)
        kit = replace(make_kit(bench.tokenizer, texts, progress=bench.progress), layers=bench.layers)
        probes = bench.texts().probes
        stolen = SchemeSuspects(rival.model, rival.key, kit, config, rival.scheme, rival.settings, probes)
        folder = rival.folder
    sources = Sources(model_sha256=base_digest(folder / "model"), corpus=THIEF)
    try:
        run_suite(stolen, [NONE], _folder(bench, name, key), sources, progress=bench.progress)
    except AttackError as absent:
        return stolen, sources, str(absent)
    return stolen, sources, None


def quantization(bench: Bench) -> Iterable[Cell]:
    """GPTQ where it is installed, and rounding to nearest."""
    rounding = [case("round to nearest, 8 bit"), case("round to nearest, 4 bit")]
    return _cells(bench, ALL, bench.pick([case("GPTQ, 8 bit"), case("GPTQ, 4 bit"), *rounding], rounding))


def fine_tuning(bench: Bench) -> Iterable[Cell]:
    """The paper's thief, who tunes routers at the paper's rate; and one who chooses the rate, also for all weights."""
    samples, tried, long = bench.pick((SAMPLES, TRIED, LONG), (64, 1, 2))
    cases, swept = [], []
    for train, name in TRAINED.items():
        how = {"train": train, "samples": samples, "length": min(TOKENS, bench.size.tokens)}

        def tuned(said: str, epochs: int, best_of: str = "", how: Mapping[str, Any] = how, **rate: float) -> Case:
            return Case(said, (step("fine-tune", epochs=epochs, **how, **rate),), epochs / 5, best_of=best_of)

        sweep = f"{name}, {_epochs(tried)}, rate "
        rates = [scaled(bench, rate) for rate in bench.pick(RATES[train], RATES[train][1:3])]
        swept += [tuned(f"{sweep}{rate:.3g}", tried, lr=rate) for rate in rates]
        cases.append(tuned(f"{name}, {_epochs(tried)}", tried, sweep))
        if train == "router":
            cases.append(tuned(f"{name}, {_epochs(long)}", long, sweep))
            cases.append(tuned(f"{name}, {_epochs(long)}, rate {PAPER_RATE:g}", long, lr=PAPER_RATE))
    return _cells(bench, ALL, cases, swept)


def _epochs(count: int) -> str:
    return f"{count} epoch{'s' * (count > 1)}"


def scaled(bench: Bench, rate: float) -> float:
    """A rate of width 128 for a model of the bench's width."""
    return rate * learning_rate(bench.hidden_size) / learning_rate(128)


def pruning(bench: Bench) -> Iterable[Cell]:
    """Neurons that are silent on the thief's text."""
    shares = bench.pick((5, 10, 15, 20, 25, 50), (25,))
    return _cells(bench, ALL, [case(f"fine-pruning, {share} %") for share in shares])


def noise(bench: Bench) -> Iterable[Cell]:
    """On the logits of the marked layers' routers while the model runs."""
    sigmas = bench.pick(("0.1", "0.25", "0.5", "1", "2"), ("0.5", "2"))
    return _cells(bench, ALL, [case(f"router noise, sigma {sigma}") for sigma in sigmas])


def overwriting(bench: Bench) -> Iterable[Cell]:
    """A second mark by our own recipe, with its care and without."""
    if bench.size.quick:
        return _cells(bench, [OURS], [Case("overwriting, 1 epoch", (step("overwrite", epochs=1, samples=32),), 0.5)])
    names = [f"overwriting, {count}" for count in ("1 epoch", "5 epochs", "10 epochs")]
    return _cells(bench, [OURS], [case(f"{how}{name}") for how in ("", "reckless ") for name in names])


def expert_removal(bench: Bench) -> Iterable[Cell]:
    """The least used experts: never chosen any more in the marked layers, or cut out of all layers."""
    ways = ("experts of the marked layers masked", "expert removal")
    shares = bench.pick((10, 30, 50), (50,))
    return _cells(bench, ALL, [case(f"{way}, {share} %") for way in ways for share in shares])


def unlearning(bench: Bench) -> Iterable[Cell]:
    """Against our mark alone: no other has target experts."""
    if bench.size.quick:
        return _cells(bench, [OURS], [Case("unlearning, 20 steps", (step("unlearn", steps=20, lr_factor=0.01),))])
    return _cells(
        bench, [OURS], [case(f"unlearning, 200 steps, {rate} x rate") for rate in ("0.01", "0.03", "0.1", "1")]
    )
