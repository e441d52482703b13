"""`pathmark.reproduce`: the paper's tables and figures, measured on a model of yours."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathmark.errors import CapacityError, MissingLibraryError
from pathmark.evaluate.reproduce.bench import QUICK, Bench, Size
from pathmark.evaluate.reproduce.catalog import EXPERIMENTS
from pathmark.evaluate.reproduce.corpora import Corpora
from pathmark.evaluate.reproduce.running import run_experiment
from pathmark.keys.safefile import exclusive, write_whole
from pathmark.progress import Progress, Silent
from pathmark.reporting.experiment_plots import draw
from pathmark.reporting.experiments import page, pages
from pathmark.results.experiment import ExperimentResult
from pathmark.results.paper import find_paper
from pathmark.results.schema import to_json

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class ReproducePlan:
    """On which model, with how many keys and whose texts."""

    model: str = "bundled:tiny"
    keys: int | None = None
    """None: three, or one with `quick`."""
    quick: bool = False
    """Few texts and few steps: all experiments in twenty minutes."""
    corpora: str | os.PathLike[str] | None = None
    """A TOML file that names text files. None: experiments with other texts than the model's own are left out."""

    @property
    def size(self) -> Size:
        """How much is trained and measured."""
        return QUICK if self.quick else Size()


@dataclass(frozen=True)
class Reproduced:
    """Results, kept in a folder with a table each and a plot of every figure."""

    results: tuple[ExperimentResult, ...]
    output: Path

    @property
    def missing(self) -> int:
        """Cells that could not be measured."""
        return sum(len(result.missing) for result in self.results)

    def summary(self) -> dict[str, Any]:
        """The content of the result files, by experiment."""
        return {"output": str(self.output), "experiments": {one.experiment: to_json(one) for one in self.results}}

    def page(self) -> str:
        """The tables, as Markdown."""
        return pages(self.results)

    def words(self) -> str:
        """One sentence for people."""
        count = sum(len(result.points) for result in self.results)
        why = [reason for result in self.results for reason in result.missing.values()]
        others = f" (and {len(set(why)) - 1} other reasons, in the tables)" if len(set(why)) > 1 else ""
        cells = f"{self.missing} cell{'s' * (self.missing != 1)}"
        lacking = f"; {cells} could not be measured: {why[0]}{others}" if why else ""
        several = "s" * (len(self.results) != 1)
        return f"{len(self.results)} experiment{several}, {count} figures in {self.output}{lacking}."


def reproduce(
    name: str,
    output: str | os.PathLike[str],
    config: ReproducePlan | None = None,
    *,
    progress: Progress | None = None,
) -> Reproduced:
    """Measure one experiment, or `all`; what the folder already holds is not measured again.

    Example:
        pathmark.reproduce("tab-whitebox", "reproduced", pathmark.ReproducePlan(quick=True)).page()
    """
    plan, out = config or ReproducePlan(), Path(output)
    names = list(EXPERIMENTS) if name == ALL else [find_paper(name).name]
    keys = plan.keys if plan.keys is not None else 1 if plan.quick else 3
    if keys < 1:
        raise CapacityError(f"expected at least one key, got {keys}")
    corpora = Corpora() if plan.corpora is None else Corpora.read(Path(plan.corpora))
    bench = Bench(plan.model, out, corpora, plan.size, keys, progress or Silent())
    out.mkdir(parents=True, exist_ok=True)
    results = []
    busy = f"another run is measuring in {out}; wait for it, or choose another folder with -o"
    with exclusive(out / "copies", busy=busy):
        for each in names:
            result = run_experiment(each, EXPERIMENTS[each], bench, out / f"{each}.json")
            render(result, out)
            results.append(result)
        if name == ALL:
            _write(out / "report.md", pages(results))
    return Reproduced(tuple(results), out)


def render(result: ExperimentResult, folder: Path) -> None:
    """Table and pictures of a result; without matplotlib the table alone."""
    _write(folder / f"{result.experiment}.md", page(result))
    try:
        draw(result, folder)
    except MissingLibraryError:  # hours of measuring are not lost to it
        return


def _write(path: Path, text: str) -> None:
    write_whole(path, text.encode(), replacing=True)
