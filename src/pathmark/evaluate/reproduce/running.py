"""An experiment is a list of cells; each is measured once, and its points are kept as soon as they are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import torch

from pathmark.errors import PathmarkError, ResultError
from pathmark.evaluate.reproduce.bench import Bench
from pathmark.models.checkpoint import base_digest
from pathmark.results import Header, write_result
from pathmark.results.experiment import FORMAT, VERSION, ExperimentResult, Point, read_experiment
from pathmark.results.paper import COLUMNS, QWEN, find_paper
from pathmark.stats import Rate

Figure = Rate | float | Sequence[float]
DESTROYED = "destroyed"
"""What a cell says besides its figures where an attack left a model that nobody would use."""


@dataclass(frozen=True)
class Cell:
    """One series at one place with one key: what is measured in one go."""

    series: str
    at: str
    key: int
    measure: Callable[[], Mapping[str, Figure]]
    """Figure -> what it came to."""

    @property
    def words(self) -> str:
        """Its name before people."""
        return f"{self.series}, {self.at}, key {self.key}"

    def points(self) -> list[Point]:
        """Measure."""
        found = dict(self.measure())
        destroyed = bool(found.pop(DESTROYED, False))
        return [self._point(figure, value, destroyed) for figure, value in found.items()]

    def _point(self, figure: str, found: Figure, destroyed: bool) -> Point:
        named = {"series": self.series, "at": self.at, "figure": figure, "key": self.key, "destroyed": destroyed}
        if isinstance(found, Rate):
            return Point(**named, rate=found)  # type: ignore[arg-type]  # text but for the key
        if isinstance(found, int | float):
            return Point(**named, value=float(found))  # type: ignore[arg-type]
        return Point(**named, values=tuple(map(float, found)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Experiment:
    """How a table or figure of the paper is measured."""

    cells: Callable[[Bench], Iterable[Cell]]
    corpora: tuple[str, ...] = ()
    """Kinds of text beside the model's own."""
    settings: tuple[object, ...] = ()
    """What else decides its figures and is not in the names of its cells."""


def run_experiment(name: str, experiment: Experiment, bench: Bench, path: Path) -> ExperimentResult:
    """Measure every cell that the file does not hold yet. What cannot be measured is named with its reason, and tried
    again in the next run.
    """
    result = _begun(name, experiment, bench, path)
    cells = list(experiment.cells(bench))
    done = {(point.series, point.at, point.key) for point in result.points}
    left = [cell for cell in cells if (cell.series, cell.at, cell.key) not in done]
    missing, measured, started = dict[str, str](), list(result.points), time.monotonic()
    before, paper = result.seconds, find_paper(name)
    for number, cell in enumerate(left):
        spent = time.monotonic() - started
        guess = 60 * (paper.quick if bench.size.quick else paper.minutes) / max(1, len(cells))
        minutes = (len(left) - number) * (spent / number if number else guess) / 60
        about = f"about {minutes:.0f} min left" if minutes >= 1 else "nearly there"
        bench.progress.stage(f"{name} {len(cells) - len(left) + number + 1}/{len(cells)}, {about}: {cell.words}", None)
        try:
            measured += cell.points()
        except PathmarkError as refused:
            missing[cell.words] = str(refused)
        result = replace(result, points=tuple(measured), missing=missing, seconds=before + time.monotonic() - started)
        write_result(path, result)
    if not left and not path.exists():  # nothing to measure is a result too
        write_result(path, result)
    return result


FILES = "files"
"""Setting of a header: corpus -> its files by name. Who moves them measures the same."""


def _begun(name: str, experiment: Experiment, bench: Bench, path: Path) -> ExperimentResult:
    header = _header(experiment, bench)
    if not path.exists():
        kind = str(bench.original.config.get_text_config().model_type)
        beside = find_paper(name).model(COLUMNS.get(kind, QWEN))
        return ExperimentResult(header=header, experiment=name, model=bench.name, beside=beside)
    found = read_experiment(path)
    moved = replace(found.header, settings={**found.header.settings, FILES: header.settings[FILES]})
    different = moved.differs(header, but=("texts_sha256",))
    before, now = found.header.texts_sha256, header.texts_sha256
    different += [f"the texts of {use}" for use in before.keys() & now.keys() if before[use] != now[use]]
    if different or found.experiment != name:
        raise ResultError(
            f"{path} holds another measurement, which differs in {', '.join(different) or 'the experiment'}; choose "
            "another folder with -o"
        )
    files = {**found.header.settings.get(FILES, {}), **header.settings[FILES]}
    header = replace(header, texts_sha256={**before, **now}, settings={**header.settings, FILES: files})
    return replace(found, header=header)


def _header(experiment: Experiment, bench: Bench) -> Header:
    digests, files = {}, {}
    for corpus in ("home", *experiment.corpora):
        try:
            digests[corpus] = bench.texts_digest(corpus)
            files[corpus] = bench.named(corpus)
        except PathmarkError:  # its cells will say why
            continue
    grid = sorted({(cell.series, cell.at) for cell in experiment.cells(bench)})
    return Header(
        format=FORMAT,
        version=VERSION,
        package=version("pathmark"),
        torch=torch.__version__,
        model_sha256=None,
        original_sha256=base_digest(bench.base),
        texts_sha256=digests,
        key=None,
        seed=0,
        n_probes=bench.size.probes,
        settings={
            "quick": bench.size.quick,
            "size": repr(bench.size),
            "layers": list(bench.layers),
            "grid": sha256(repr((grid, experiment.settings)).encode()).hexdigest(),
            "defaults": sha256(repr(bench.defaults).encode()).hexdigest(),
            FILES: files,
        },
    )
