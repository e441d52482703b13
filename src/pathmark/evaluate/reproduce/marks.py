"""Are marks found, and what do they cost? Five schemes side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from pathmark.baselines import SchemeVerdict
from pathmark.baselines.green import GreenLists
from pathmark.baselines.kgw import GreenConfig
from pathmark.evaluate.reproduce.bench import OURS, RIVALS, Bench, RivalCopy
from pathmark.evaluate.reproduce.recipes import Recipe
from pathmark.evaluate.reproduce.running import Cell, Figure
from pathmark.models import Perplexity, device_of, perplexity
from pathmark.stats import Rate
from pathmark.verification import PathVerdict, verify_model

CORPORA = ("wikitext", "ptb", "c4")
PASSED = "median_p_of_texts_that_pass"
"""A figure of KGW's statistic, which the paper prints as its p-value."""
REPEATED = "answers_that_hold_it_with_letters_repeated"
"""A figure of IFMark's, which the paper counts as its WSR."""


def effectiveness(bench: Bench) -> Iterable[Cell]:
    """Every scheme, marked on each kind of text and judged on held-out text of the same kind."""
    for corpus in CORPORA:
        for name in (*RIVALS, OURS):
            for key in range(bench.keys):
                yield Cell(name, corpus, key, partial(_found, bench, name, corpus, key))


def _found(bench: Bench, name: str, corpus: str, key: int) -> Mapping[str, Figure]:
    if name == OURS:
        copy = bench.ours(key, Recipe(corpus=corpus))
        marked, innocent = (verify_model(m, copy.key, bench.probes(corpus)) for m in (copy.model, bench.original))
        return _detected(marked, innocent)
    rival = bench.theirs(name, key, corpus)
    found, absent = (_judged(bench, rival, model, corpus) for model in (rival.model, bench.original))
    more: dict[str, Figure] = {}
    if (passed := found.figures.get(PASSED)) is not None:
        more["median log10 p of texts that pass"] = math.log10(passed)
    if (held := found.figures.get(REPEATED)) is not None:
        more["WSR, letters repeated too"] = Rate(round(held), found.wsr.n)
    return {**_detected(found, absent), **more}


def _detected(found: PathVerdict | SchemeVerdict, absent: PathVerdict | SchemeVerdict) -> dict[str, Figure]:
    """What a scheme says of the marked model, and of the original."""
    p = {"log10 p": found.p, "log10 p of the original": absent.p}
    return {
        "WSR": found.wsr, "WSR of the original": absent.wsr,
        **{name: value.log10 for name, value in p.items() if value is not None},
        "found": Rate(int(found.marked), 1), "found in the original": Rate(int(absent.marked), 1),
    }  # fmt: skip


def _judged(bench: Bench, rival: RivalCopy, model: PreTrainedModel, corpus: str) -> SchemeVerdict:
    probes = bench.texts(corpus).probes
    verdict = rival.scheme.verify(model, bench.tokenizer, rival.settings, probes, progress=bench.progress)
    assert isinstance(verdict, SchemeVerdict)
    return verdict


def perplexities(bench: Bench) -> Iterable[Cell]:
    """Marked on the model's own kind of text, measured on three."""
    for name in (*RIVALS, OURS):
        for key in range(bench.keys):
            for corpus in ("home", "wikitext", "ptb"):
                yield Cell(name, corpus, key, partial(_cost, bench, name, corpus, key))


def _cost(bench: Bench, name: str, corpus: str, key: int) -> Mapping[str, Figure]:
    probes = bench.probes(corpus)
    before = perplexity(bench.original, probes).value
    if name == OURS:
        copy = bench.ours(key)
        trigger = copy.key.watermarks[0].triggers[0].tokens
        behind = [(*trigger, *text) for text in probes]
        first, after = (perplexity(model, behind, skip=len(trigger)).value for model in (bench.original, copy.model))
        clean = perplexity(copy.model, probes).value
        # all against the original on clean text, as in the paper; it stumbles over the trigger too
        return {
            "PPL": clean, "change of PPL, %": percent(before, clean), "behind the trigger, %": percent(before, after),
            "original behind the trigger, %": percent(before, first),
        }  # fmt: skip
    rival = bench.theirs(name, key)
    if rival.scheme.in_weights:
        after = perplexity(rival.model, probes).value
    else:
        after = biased_perplexity(bench.original, rival.settings, probes).value
    return {"PPL": after, "change of PPL, %": percent(before, after)}


def percent(before: float, after: float) -> float:
    """The change in percent."""
    return 100 * (after / before - 1)


@torch.no_grad()
def biased_perplexity(model: PreTrainedModel, config: GreenConfig, rows: Sequence[Sequence[int]]) -> Perplexity:
    """Perplexity under the distribution that KGW samples from: green tokens get delta."""
    lists = GreenLists(config.watermark, config.vocabulary)
    total, tokens = 0.0, 0
    for row in rows:
        ids_T = torch.tensor(row, device=device_of(model))
        logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float()
        green_TV = lists.after_each(ids_T[:-1].cpu()).to(logits_TV)
        total += float(cross_entropy(logits_TV + config.delta * green_TV, ids_T[1:], reduction="sum"))
        tokens += len(row) - 1
    return Perplexity(total, tokens)
