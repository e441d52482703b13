"""How long the exact test takes, and how tight its bracket is, from weak to overwhelming evidence.

    OMP_NUM_THREADS=1 python benchmarks/exact_speed.py

Values are differences of two skewed random distributions over experts, the statistic a share of the best.
"""

from __future__ import annotations

import time

import numpy as np

from pathmark.stats import NullDistribution


def main() -> None:
    rng = np.random.default_rng(0)
    print("| E | k | layers | share of best | p | p / lower bound - 1 | method | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for n_experts, width, n_layers in ((60, 2, 6), (128, 2, 12), (128, 8, 12), (256, 8, 58)):
        concentration = np.full(n_experts, 0.3)
        values = [(rng.dirichlet(concentration) - rng.dirichlet(concentration), width) for _ in range(n_layers)]
        for share in (0.1, 0.5, 0.9, 1.0):
            null = NullDistribution(values)
            started = time.perf_counter()
            tail = null.tail(share * null.maximum)
            seconds = time.perf_counter() - started
            gap = 10 ** (tail.p.log10 - tail.lower.log10) - 1
            print(
                f"| {n_experts} | {width} | {n_layers} | {share} | {tail.p} | {100 * gap:.1f} % | "
                f"{tail.method} | {seconds:.2f} |"
            )


if __name__ == "__main__":
    main()
