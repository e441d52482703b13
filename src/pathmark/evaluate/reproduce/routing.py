"""What marks do to routing: narrow decisions, masses on targets, and how experts are chosen on clean text.

Shape suffixes: N text tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from pathmark.baselines.ifmark import asked
from pathmark.evaluate.reproduce.bench import OURS, Bench
from pathmark.evaluate.reproduce.recipes import Recipe
from pathmark.evaluate.reproduce.running import Cell, Figure
from pathmark.release.fidelity import drift
from pathmark.stats import concentration_mean, concentration_pooled, detection_samples
from pathmark.verification import Routes, record_routes, score_path
from pathmark.verification.paths.measures import target_mass

CONFIDENCE = 0.05
"""Of the corollary on detection: 95 % sure."""


def motivation(bench: Bench) -> Iterable[Cell]:
    """A rival's trigger and ours: how narrowly experts are chosen, and how many clean text shares."""
    for key in range(bench.keys):
        yield Cell("IFMark", "its trigger", key, partial(_rival_trigger, bench, key))
        yield Cell(OURS, "its trigger", key, partial(_our_trigger, bench, key))


def _rival_trigger(bench: Bench, key: int) -> Mapping[str, Figure]:
    rival = bench.theirs("IFMark", key)
    rows = [asked(bench.tokenizer, text) for text in rival.settings.instructions("keys", rival.settings.keys)]
    return _compared(bench, rival.model, record_routes(rival.model, rows, bench.routed), bench.routed)


def _our_trigger(bench: Bench, key: int) -> Mapping[str, Figure]:
    copy = bench.ours(key)
    mark = copy.key.watermarks[0]
    triggered = record_routes(copy.model, bench.probes(), mark.layers, prefix=mark.triggers[0].tokens)
    return _compared(bench, copy.model, triggered, mark.layers)


def _compared(bench: Bench, model: PreTrainedModel, triggered: Routes, layers: Sequence[int]) -> Mapping[str, Figure]:
    clean = record_routes(model, bench.probes(), layers)
    chosen = triggered.decisions[layers[-1]].shape[-1]
    sorted_NE = np.concatenate([-np.sort(-triggered.probs[layer][triggered.mask_BT], axis=-1) for layer in layers])
    lead_N = sorted_NE[:, chosen - 1] - sorted_NE[:, chosen]
    shares = [(choices(clean, layer), choices(triggered, layer)) for layer in layers]
    return {
        "first expert's probability": float(sorted_NE[:, 0].mean()),
        "last chosen expert's probability": float(sorted_NE[:, chosen - 1].mean()),
        "its lead over the first not chosen": float(np.median(lead_N)),
        "shared with clean text": float(np.mean([np.minimum(a, b).sum() for a, b in shares])),
        "choices, clean": shares[-1][0].tolist(),
        "choices, triggered": shares[-1][1].tolist(),
    }


def choices(routes: Routes, layer: int) -> NDArray[np.float64]:
    """Share of all choices in a layer that each expert has."""
    chosen = routes.decisions[layer][routes.mask_BT].ravel()
    count_E = np.bincount(chosen[chosen >= 0], minlength=routes.n_experts(layer)).astype(np.float64)
    share_E: NDArray[np.float64] = count_E / count_E.sum()
    return share_E


def expert_selection(bench: Bench) -> Iterable[Cell]:
    """Clean text in the two last marked layers: how experts are chosen before and after."""
    for layer in bench.layers[-2:]:
        yield Cell("original", f"layer {layer}", 0, partial(_chosen, bench, layer))
        for key in range(bench.keys):
            yield Cell(OURS, f"layer {layer}", key, partial(_moved, bench, layer, key, Recipe()))


def _chosen(bench: Bench, layer: int) -> Mapping[str, Figure]:
    return {"choices": choices(record_routes(bench.original, bench.probes(), [layer]), layer).tolist()}


def _moved(bench: Bench, layer: int, key: int, recipe: Recipe) -> Mapping[str, Figure]:
    """One layer of a marked copy on clean text."""
    copy = bench.ours(key, recipe)
    before, after = (record_routes(model, bench.probes(), [layer]) for model in (bench.original, copy.model))
    moved, mark = drift(before, after), copy.key.watermarks[0]
    targets, shares = mark.targets(layer), (choices(before, layer), choices(after, layer))
    every = record_routes(copy.model, bench.probes(), mark.layers)
    return {
        "KL": moved.kl,
        "same choice": moved.topk_agreement,
        "observations that tell": detection_samples(moved.kl, CONFIDENCE),
        "targets' choices, %": 100 * float(shares[1][list(targets)].sum()),
        "in the original, %": 100 * float(shares[0][list(targets)].sum()),
        "false positives": score_path(mark, every).wsr,
        "choices": shares[1].tolist(),
    }


def contrastive(bench: Bench) -> Iterable[Cell]:
    """The paper's recipe without its contrast, with it, and our anchor in its place, on clean text."""
    layer = bench.layers[len(bench.layers) // 2]
    yield Cell("original", f"layer {layer}", 0, partial(_chosen, bench, layer))
    recipes = {
        "no contrast": Recipe(objective="paper", stealth_weight=0.0),
        "contrast": Recipe(objective="paper"),
        "anchor": Recipe(),
    }
    for name, recipe in recipes.items():
        for key in range(bench.keys):
            yield Cell(name, f"layer {layer}", key, partial(_moved, bench, layer, key, recipe))


def whitebox(bench: Bench) -> Iterable[Cell]:
    """Routing mass on the targets behind the trigger, in the marked model and in the original."""

    @cache
    def masses(key: int) -> dict[int, tuple[float, float]]:
        copy = bench.ours(key)
        mark = copy.key.watermarks[0]
        marked, original = (
            record_routes(model, bench.probes(), mark.layers, prefix=mark.triggers[0].tokens)
            for model in (copy.model, bench.original)
        )
        both = {}
        for layer in mark.layers:
            targets = mark.targets(layer)
            both[layer] = target_mass(marked, layer, targets), target_mass(original, layer, targets)
        return both

    def at(key: int, layer: int) -> Mapping[str, Figure]:
        marked, original = masses(key)[layer]
        return _masses(marked, original, marked / original)

    def mean(key: int) -> Mapping[str, Figure]:
        marked, original = zip(*masses(key).values(), strict=True)
        found = _masses(float(np.mean(marked)), float(np.mean(original)), concentration_mean(marked, original))
        return {**found, "ratio of the sums": concentration_pooled(marked, original)}

    for key in range(bench.keys):
        for layer in bench.layers:
            yield Cell(OURS, f"L{layer}", key, partial(at, key, layer))
        yield Cell(OURS, "mean", key, partial(mean, key))


def _masses(marked: float, original: float, ratio: float) -> Mapping[str, Figure]:
    return {"mass triggered, %": 100 * marked, "mass in the original, %": 100 * original, "ratio": ratio}
