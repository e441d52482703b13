"""Is a p-value what it says? 20,000 random keys against unmarked routing: exact test and paper's bound.

    python benchmarks/null_calibration.py            prints the figures of docs/statistics.md
    python benchmarks/null_calibration.py --plot docs/img/null_calibration.png
    python benchmarks/null_calibration.py --cases    pools, erasures, counts, three watermarks (a minute)

The routing is simulated to be hard on any assumption: expert popularity is skewed, tokens of one text go the
same way, and a prefix that means nothing to the model still shifts all tokens in one direction.

Shape suffixes: L layers, B texts, T tokens, E experts, K keys, W target experts per layer.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pathmark.stats import (
    LayerEvidence,
    NullDistribution,
    exact_test_many,
    mass_difference,
    selection_difference,
)

LEVELS = (0.5, 0.05, 0.01, 0.001)
Floats = NDArray[np.float64]


def null_routing(
    rng: np.random.Generator, n_layers: int, n_texts: int, n_tokens: int, n_experts: int
) -> tuple[Floats, Floats]:
    """Routing probabilities (L, B, T, E) of an unmarked model with and without a meaningless prefix."""
    popularity = rng.normal(0, 1.5, (n_layers, 1, 1, n_experts))
    topic = rng.normal(0, 1.5, (n_layers, n_texts, 1, n_experts))
    prefix = rng.normal(0, 0.7, (n_layers, 1, 1, n_experts))
    routing = []
    for shift in (prefix, 0.0):
        token = rng.normal(0, 0.5, (n_layers, n_texts, n_tokens, n_experts))
        weights = np.exp(popularity + topic + token + shift)
        routing.append(weights / weights.sum(axis=-1, keepdims=True))
    return routing[0], routing[1]


def random_targets(rng: np.random.Generator, n_keys: int, pool_size: int, width: int) -> NDArray[np.int64]:
    """targets_KW: a uniform subset of range(pool_size) per key."""
    return np.argpartition(rng.random((n_keys, pool_size)), width - 1, axis=1)[:, :width]


def pair_hits(probs_NE: Floats, targets_KW: NDArray[np.int64], top: int) -> NDArray[np.int64]:
    """For each key, on how many of the N tokens at least one of its two targets is in the top `top`."""
    chosen = np.zeros(probs_NE.shape)
    np.put_along_axis(chosen, np.argsort(-probs_NE, axis=1)[:, :top], 1.0, axis=1)
    together = chosen.T @ chosen
    first, second = targets_KW.T
    return (together[first, first] + together[second, second] - together[first, second]).astype(np.int64)


def measure(seed: int, n_keys: int, n_experts: int = 60, n_layers: int = 6, n_texts: int = 20, n_tokens: int = 50):
    """log10 p of each key by the exact test and by the paper's bound (top-1 hits, any hit in the top 2)."""
    rng = np.random.default_rng(seed)
    triggered, clean = null_routing(rng, n_layers, n_texts, n_tokens, n_experts)
    mask_BT = np.ones((n_texts, n_tokens), dtype=bool)
    targets = [random_targets(rng, n_keys, n_experts, 2) for _ in range(n_layers)]
    diffs = [mass_difference(t, c, mask_BT) for t, c in zip(triggered, clean, strict=True)]
    statistics_K = sum(diff_E[t_KW].sum(axis=1) for diff_E, t_KW in zip(diffs, targets, strict=True))
    results = {"exact": NullDistribution([(diff_E, 2) for diff_E in diffs]).log10_p(statistics_K)}
    n_decisions = n_layers * n_texts * n_tokens
    for name, top in (("paper, top-1 hits", 1), ("paper, any hit", 2)):
        hits_K = sum(
            pair_hits(probs.reshape(-1, n_experts), t_KW, top) for probs, t_KW in zip(triggered, targets, strict=True)
        )
        # stats.paper.paper_bound on arrays: exp(-2n (Acc - k/N)^2) above the null rate, else 1.
        excess_K = np.maximum(hits_K / n_decisions - 2 / n_experts, 0)
        results[name] = -2 * n_decisions * excess_K**2 / np.log(10)
    return results


def differences(seed: int, n_layers: int, n_experts: int, counts: bool) -> list[NDArray[np.generic]]:
    """diff_E per layer of an unmarked model: of routing masses, or of selection counts in the top 4."""
    rng = np.random.default_rng(seed)
    triggered, clean = null_routing(rng, n_layers, 12, 40, n_experts)
    mask_BT = rng.random((12, 40)) < 0.9
    if not counts:
        return [mass_difference(t, c, mask_BT) for t, c in zip(triggered, clean, strict=True)]
    top = [np.argsort(-probs, axis=-1)[..., :4] for probs in (triggered, clean)]
    return [selection_difference(t, c, mask_BT, n_experts) for t, c in zip(*top, strict=True)]


def one_watermark(n_keys: int, counts: bool, erasures: bool) -> Floats:
    """log10 p per key: 4 layers, pools of 18 out of 24 experts, a quarter of the experts lost or none.

    Keys with the same numbers of surviving targets share a null distribution.
    """
    n_layers, n_experts, pool_size = 4, 24, 18
    rng = np.random.default_rng(11)
    diffs = differences(5, n_layers, n_experts, counts)
    pools = [rng.permutation(n_experts)[:pool_size] for _ in range(n_layers)]
    matched = [rng.random(n_experts) >= (0.25 if erasures else 0) for _ in range(n_layers)]
    statistics_K, live_KL = np.zeros(n_keys), np.zeros((n_keys, n_layers), dtype=np.int64)
    for layer in range(n_layers):
        targets_KW = pools[layer][random_targets(rng, n_keys, pool_size, 2)]
        live_KW = matched[layer][targets_KW]
        statistics_K += (diffs[layer][targets_KW] * live_KW).sum(axis=1)
        live_KL[:, layer] = live_KW.sum(axis=1)
    log10_p_K = np.zeros(n_keys)
    patterns, member_K = np.unique(live_KL, axis=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        here = member_K.reshape(-1) == number
        parts = zip(diffs, pools, matched, pattern, strict=True)
        null = NullDistribution([(diff_E[pool[live[pool]]], int(k)) for diff_E, pool, live, k in parts])
        log10_p_K[here] = null.log10_p(statistics_K[here], size=2**11)
    return log10_p_K


def three_watermarks(n_keys: int, counts: bool, erasures: bool) -> Floats:
    """log10 of the combined p per key: three watermarks with their own triggers, overlapping in layers."""
    rng = np.random.default_rng(12)
    n_experts, pool = 11, list(range(1, 11))
    diffs = [differences(20 + j, 2, n_experts, counts) for j in range(3)]
    matched = [rng.random(n_experts) >= (0.2 if erasures else 0) for _ in range(3)]
    layers_of = ((4, 5), (4, 5), (5, 6))
    log10_p_K = np.zeros(n_keys)
    for key in range(n_keys):
        order = {layer: [pool[i] for i in rng.permutation(10)] for layer in (4, 5, 6)}
        watermarks = [
            [
                LayerEvidence(layer, diff_E, pool, order[layer][2 * j : 2 * j + 2], matched[layer - 4])
                for layer, diff_E in zip(layers_of[j], diffs[j], strict=True)
            ]
            for j in range(3)
        ]
        log10_p_K[key] = exact_test_many(watermarks).p.log10
    return log10_p_K


def plot(results: dict[str, Floats], path: Path) -> None:
    """Share of keys with p <= a over a: a valid test stays on or below the diagonal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colours = {"exact": "#1f6f4a", "paper, top-1 hits": "#b5402a", "paper, any hit": "#e09a2b"}
    labels = {
        "exact": "exact test",
        "paper, top-1 hits": "paper's bound, top-1 hits",
        "paper, any hit": "paper's bound, any hit in top k",
    }
    figure, panels = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
    for axes, exponent in zip(panels, (-4, -60), strict=True):
        levels = np.logspace(exponent, 0, 400)
        for name, log10_p in results.items():
            share = np.array([(log10_p <= np.log10(a)).mean() for a in levels])
            axes.plot(levels[share > 0], share[share > 0], color=colours[name], lw=2, label=labels[name])
        axes.plot(levels, levels, color="black", lw=1, ls="--", label="what a p-value promises")
        axes.set(xscale="log", yscale="log", xlim=(10.0**exponent, 1), ylim=(4e-5, 1.5), xlabel="a")
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("share of random keys with p ≤ a")
    panels[0].legend(frameon=False, loc="lower right", fontsize=9)
    figure.suptitle(f"Unmarked model, {len(results['exact']):,} random keys (right: further out)", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="also draw the figure into this file")
    parser.add_argument("--cases", action="store_true", help="pools, erasures, counts, three watermarks")
    arguments = parser.parse_args()
    if arguments.cases:
        print_header(f"{arguments.keys} keys; share of keys with p <= a", LEVELS)
        for counts in (False, True):
            for erasures in (False, True):
                name = f"{'counts' if counts else 'masses'}{', erasures' if erasures else ''}"
                print_shares(f"one, {name}", one_watermark(arguments.keys, counts, erasures), LEVELS)
                print_shares(f"three, {name}", three_watermarks(arguments.keys, counts, erasures), LEVELS)
        return
    started = time.perf_counter()
    results = measure(arguments.seed, arguments.keys)
    levels = (*LEVELS, 1e-6, 1e-20)
    print_header(f"{arguments.keys} keys, 60 experts, k = 2, 6 layers, 1000 tokens; share of keys with p <= a", levels)
    for name, log10_p_K in results.items():
        print_shares(name, log10_p_K, levels)
    print(f"{time.perf_counter() - started:.1f} s")
    if arguments.plot:
        plot(results, arguments.plot)


def print_header(title: str, levels: tuple[float, ...]) -> None:
    print(title)
    print(f"{'a':>24}" + "".join(f"{a:>10.0e}" for a in levels))


def print_shares(name: str, log10_p_K: Floats, levels: tuple[float, ...]) -> None:
    shares = "".join(f"{(log10_p_K <= np.log10(a)).mean():>10.5f}" for a in levels)
    print(f"{name:>24}{shares}   smallest p: 1e{log10_p_K.min():.1f}")


if __name__ == "__main__":
    main()
