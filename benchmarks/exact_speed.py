"""How long the exact test takes, and how tight its bracket is, from weak to overwhelming evidence.

python benchmarks/exact_speed.py            # some minutes; `make bench` runs it too
python benchmarks/exact_speed.py --render   # -> docs/speed.md

Values are differences of two skewed random distributions over experts, the statistic a share of the best.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from marked import bundled_header
from pages import DOCS, write_section
from pathmark.results import Header, read_result, write_result
from pathmark.stats import NullDistribution

FORMAT, VERSION = "pathmark-exact-speed", 1
RESULT = Path(__file__).parent / "results" / "exact_speed.json"
DOC = DOCS / "speed.md"
SHAPES = ((64, 2, 4), (60, 2, 6), (128, 2, 12), (128, 8, 12), (256, 8, 58))
"""Experts, path width and marked layers: the bundled model, then real ones up to DeepSeek-V3."""
SHARES = (0.1, 0.5, 0.9, 1.0)


@dataclass(frozen=True, kw_only=True)
class Test:
    """One p-value."""

    experts: int
    width: int
    layers: int
    share: float
    """Of the largest statistic there is."""
    log10_p: float
    gap: float
    """By how much the upper bound exceeds the lower one, as a share of it."""
    method: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ExactSpeed:
    """All of them, from one run."""

    header: Header
    tests: tuple[Test, ...]


def measure() -> list[Test]:
    rng = np.random.default_rng(0)
    found = []
    for experts, width, layers in SHAPES:
        concentration = np.full(experts, 0.3)
        values = [(rng.dirichlet(concentration) - rng.dirichlet(concentration), width) for _ in range(layers)]
        for share in SHARES:
            started = time.perf_counter()
            null = NullDistribution(values)
            tail = null.tail(share * null.maximum)
            seconds = time.perf_counter() - started
            found.append(
                Test(
                    experts=experts, width=width, layers=layers, share=share, log10_p=tail.p.log10,
                    gap=10 ** (tail.p.log10 - tail.lower.log10) - 1, method=tail.method, seconds=seconds,
                )
            )  # fmt: skip
            print(found[-1], flush=True)
    return found


def render() -> None:
    tests = read_result(RESULT, ExactSpeed, FORMAT, VERSION).tests
    lines = [
        "The exact test: seconds for one p-value, from weak evidence to the strongest there can be, and the largest "
        "gap between its upper bound, which is what is reported, and its lower one.",
        "",
        "| experts | path width | layers | " + " | ".join(f"{share:g} of the most" for share in SHARES) + " | gap |",
        "|---|---|---|" + "---|" * (len(SHARES) + 1),
    ]
    for shape in SHAPES:
        here = [test for test in tests if (test.experts, test.width, test.layers) == shape]
        cells = [f"{test.seconds:.2f} s, 1e{test.log10_p:.0f}" for test in here]
        gap = max(test.gap for test in here)
        lines.append(f"| {' | '.join(map(str, shape))} | {' | '.join(cells)} | {100 * gap:.1f} % |")
    write_section(DOC, "exact_speed.py", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="measure nothing, rewrite the page's table")
    if not parser.parse_args().render:
        header = bundled_header(FORMAT, VERSION, n_probes=0, settings={"seed": 0, "shapes": repr(SHAPES)})
        write_result(RESULT, ExactSpeed(header=header, tests=tuple(measure())))
        RESULT.chmod(0o644)
    render()


if __name__ == "__main__":
    main()
