"""Evidence against utility: one point per attack and key, up is more evidence, right is a worse model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pathmark.reporting.pictures import HUES, require_matplotlib
from pathmark.reporting.robustness import LEVEL, evidence_left
from pathmark.results.robustness import Measured, Row

LEAST_COST = 0.01
"""Percent; a logarithmic axis has no zero."""
MARKERS = "osD^vP<>X*"
"""One for each kind of attack, as there are hues."""
KINDS = {
    "fewer bits": ("rtn", "gptq", "auto-round"),
    "training on text": ("fine-tune",),
    "pruning, experts or layers gone": (
        "fine-prune", "remove-experts", "mask-experts", "reap", "merge-experts", "drop-layers", "top-k"
    ),
    "noise": ("router-noise", "weight-noise"),
    "another mark on top": ("overwrite",),
    "marks trained away": ("unlearn", "search-unlearn", "inject-unlearn"),
    "routers distilled": ("distill-routers",),
    "the same function, written otherwise": (
        "permute-experts", "shift-routers", "permute-neurons", "rescale-neurons", "rotate", "permute-vocabulary",
        "extend-vocabulary", "duplicate-experts",
    ),
    "mixed with another model": ("average", "dare-ties", "low-rank", "transplant"),
    "several one after the other": ("combination",),
}  # fmt: skip
"""What a legend can hold: kind -> groups of the result file."""


def cost(row: Measured) -> float:
    """What the thief paid, in percent: the rise of perplexity on the text where it is smaller."""
    thief = row.ppl_thief_change
    return max(100 * (row.ppl_change if thief is None else min(row.ppl_change, thief)), LEAST_COST)


def kind_of(row: Measured) -> str:
    """Under which name a row stands in the legend."""
    return next((kind for kind, groups in KINDS.items() if row.group in groups), row.group)


def kinds_of(rows: Sequence[Measured]) -> list[str]:
    """The kinds of attack among these rows, each with its place among markers and colours."""
    found = {kind_of(row) for row in rows}
    return [kind for kind in (*KINDS, *sorted(found - KINDS.keys())) if kind in found]


def draw_plane(axes: Any, rows: Sequence[Measured], kinds: Sequence[str], *, ink: str, paper: str) -> None:
    """The points, by kind of attack, and the level of a verdict; planes that stand side by side share their kinds."""
    for place, kind in enumerate(kinds):
        chosen = [row for row in rows if kind_of(row) == kind]
        axes.plot(
            [cost(row) for row in chosen], [evidence_left(row) for row in chosen], MARKERS[place % len(MARKERS)],
            color=HUES[place % len(HUES)], markersize=7, alpha=0.8, markeredgecolor=paper, markeredgewidth=0.7,
            label=kind,
        )  # fmt: skip
    level = -math.log10(LEVEL)
    axes.axhline(level, color=ink, linewidth=1, linestyle="--")
    axes.annotate(
        f"level {LEVEL:g}", (1, level), xycoords=("axes fraction", "data"), textcoords="offset points",
        xytext=(-2, 4), ha="right", color=ink, fontsize=10,
    )  # fmt: skip
    axes.set_xscale("log")
    axes.margins(y=0.08)
    axes.set_ylim(bottom=min(-0.4, axes.get_ylim()[0]))
    axes.set(xlabel=f"rise of perplexity, % ({LEAST_COST} stands for none)", ylabel="evidence left, -log10 p")


def plot(panels: Sequence[tuple[str, Sequence[Row]]], path: Path) -> None:
    """A PNG with one panel per (title, rows)."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [[row for row in rows if isinstance(row, Measured) and row.steps] for _, rows in panels]
    kinds = kinds_of([row for rows in measured for row in rows])
    figure = Figure(figsize=(7.5 * len(panels), 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    planes = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True)[0]
    for axes, (title, _), rows in zip(planes, panels, measured, strict=True):
        axes.grid(alpha=0.25)
        draw_plane(axes, rows, kinds, ink="0.3", paper="white")
        axes.set_title(title)
    handles, labels = planes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.savefig(path, dpi=120)
