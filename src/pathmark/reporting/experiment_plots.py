"""Pictures of an experiment, from its result file alone: lines over the places, experts by their use, barcodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pathmark.reporting.barcode import write_barcode
from pathmark.reporting.experiments import pooled_rate, scalar_figures
from pathmark.reporting.pictures import HUES, require_matplotlib
from pathmark.results.experiment import ExperimentResult, Point

PANELS = 4
"""At most so many of lines: the first figures are those that the paper shows."""


def draw(result: ExperimentResult, folder: Path) -> list[Path]:
    """Pictures beside the table: a plot of a figure, barcodes of paths. What was written."""
    drawn = _barcodes(result, folder)
    if result.experiment.startswith("fig-") and result.points:
        drawn.append(folder / f"{result.experiment}.png")
        _plot(result, drawn[-1])
    return drawn


def _barcodes(result: ExperimentResult, folder: Path) -> list[Path]:
    written = []
    for point in result.points:
        if point.figure == "path" and point.values is not None:
            file = folder / f"{result.experiment}-{point.series.replace(' ', '-')}.svg"
            file.unlink(missing_ok=True)  # barcodes are never overwritten by their writer
            write_barcode([int(index) for index in point.values], file)
            written.append(file)
    return written


def _plot(result: ExperimentResult, path: Path) -> None:
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figures = [name for name in scalar_figures(result) if any(point.figure == name for point in result.points)]
    places = list(dict.fromkeys(point.at for point in result.points))
    spread = [point for point in result.points if point.values is not None and point.key == 0]
    lines = [] if spread else figures[:PANELS]
    panels = [*lines, *dict.fromkeys(point.at for point in spread)]
    figure = Figure(figsize=(5.5 * max(1, len(panels)), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, max(1, len(panels)), squeeze=False)[0], panels, strict=True):
        axes.grid(alpha=0.25)
        if name in lines:
            _lines(axes, [point for point in result.points if point.figure == name], places)
            axes.set_ylabel(name)
        else:
            _experts(axes, [point for point in spread if point.at == name])
            axes.set_title(name)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def _lines(axes: Any, points: Sequence[Point], places: Sequence[str]) -> None:
    """One line per series over the places, with intervals of rates."""
    shown = [at for at in places if any(point.at == at for point in points)]
    for number, name in enumerate(dict.fromkeys(point.series for point in points)):
        x, y, low, high = [], [], [], []
        for place, at in enumerate(shown):
            here = [point for point in points if (point.series, point.at) == (name, at)]
            rates, values = [p.rate for p in here if p.rate], [p.value for p in here if p.value is not None]
            if rates:
                rate = pooled_rate(rates)
                value, interval = rate.value, rate.interval()
            elif values:
                value, interval = sum(values) / len(values), (min(values), max(values))
            else:
                continue
            x.append(place)
            y.append(value)
            low.append(max(0.0, value - interval[0]))
            high.append(max(0.0, interval[1] - value))
        axes.errorbar(x, y, yerr=(low, high), marker="o", capsize=3, color=HUES[number % len(HUES)], label=name)
    axes.set_xticks(range(len(shown)), shown, rotation=30, ha="right", fontsize=7)


def _experts(axes: Any, points: Sequence[Point]) -> None:
    """Experts from the most to the least chosen of the first series, and the same order for the others."""
    first = points[0].values
    assert first is not None
    order = sorted(range(len(first)), key=lambda expert: -first[expert])
    for number, point in enumerate(points):
        values = point.values
        if values is not None and len(values) == len(first):
            label = f"{point.series}: {point.figure}"
            axes.step(range(len(order)), [values[e] for e in order], color=HUES[number % len(HUES)], label=label)
    axes.set(xlabel="experts, the most chosen first", ylabel="share of choices")
