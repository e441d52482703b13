"""The paper's tables and figures as they were measured here, for docs/results.md.

python benchmarks/reproduced.py run tab-whitebox fig-noise --work DIR [--corpora examples/corpora.toml] [--keys 3]
python benchmarks/reproduced.py run fig-ppl --work DIR --model zoo/mixtral     # one of `make train-zoo`
python benchmarks/reproduced.py render

`run` is `pathmark reproduce`, whose result files are kept in benchmarks/results/reproduced: it goes on from those, so
that a night's work can be done in parts.
"""

from __future__ import annotations

import argparse
import shutil
import traceback
from pathlib import Path

from pages import DOCS, write_section
from pathmark import ReproducePlan, reproduce
from pathmark.cli._progress import training_bar
from pathmark.reporting.experiment_plots import draw
from pathmark.reporting.experiments import page
from pathmark.results.experiment import ExperimentResult, read_experiment
from pathmark.results.paper import papers

RESULTS = Path(__file__).parent / "results" / "reproduced"
DOC = DOCS / "results.md"
CORPORA = Path(__file__).parent.parent / "examples" / "corpora.toml"


def run(names: list[str], model: str, work: Path, corpora: Path, keys: int) -> None:
    """Measure, and keep each result as soon as it is there."""
    short = Path(model).name.replace(":", "-")
    kept, folder = RESULTS / short, work / short
    folder.mkdir(parents=True, exist_ok=True)
    kept.mkdir(parents=True, exist_ok=True)
    broken = []
    for name in names:
        file = kept / f"{name}.json"
        if file.exists() and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
        try:
            with training_bar(quiet=False) as bar:
                found = reproduce(name, folder, ReproducePlan(model=model, keys=keys, corpora=corpora), progress=bar)
            print(found.words(), flush=True)
        except Exception:  # the others of a night are not lost to it
            traceback.print_exc()
            broken.append(name)
        finally:  # what was measured before an interruption too
            if (folder / file.name).exists():
                shutil.copyfile(folder / file.name, file)
                file.chmod(0o644)
    if broken:
        raise SystemExit(f"not finished: {', '.join(broken)}")


def render() -> None:
    """Every table that has been measured, in the order of the paper, model by model."""
    lines = []
    for folder in sorted(RESULTS.glob("*/")):
        results = [read_experiment(folder / f"{name}.json") for name in papers() if (folder / f"{name}.json").exists()]
        lines += [f"## The paper's tables and figures on `{results[0].model}`", "", *measured(results), ""]
        for result in results:
            lines += [page(result).replace("## ", "### ", 1).rstrip(), "", *pictures(result, folder.name)]
    write_section(DOC, "reproduced.py", lines)


def measured(results: list[ExperimentResult]) -> list[str]:
    """How long it took, and what is still to be measured."""
    hours = sum(result.seconds for result in results) / 3600
    left = [f"`{name}`" for name in papers() if name not in {result.experiment for result in results}]
    told = f" Not measured yet: {', '.join(left)}." if left else ""
    return [f"{len(results)} of {len(papers())} experiments, {hours:.1f} hours of measuring.{told}"]


def pictures(result: ExperimentResult, model: str) -> list[str]:
    """The picture of a figure and the barcodes of paths, drawn from the result file."""
    folder = DOC.parent / "img" / "reproduced" / model
    folder.mkdir(parents=True, exist_ok=True)
    title = papers()[result.experiment].title
    return [f"![{title}](img/reproduced/{model}/{file.name})\n" for file in draw(result, folder)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "render"])
    parser.add_argument("names", nargs="*", help="experiments; none: all of them")
    parser.add_argument("--model", default="bundled:tiny")
    parser.add_argument("--work", type=Path, default=Path("reproduced-work"))
    parser.add_argument("--corpora", type=Path, default=CORPORA)
    parser.add_argument("--keys", type=int, default=3)
    args = parser.parse_args()
    if args.action == "run":
        run(args.names or list(papers()), args.model, args.work, args.corpora, args.keys)
    else:
        render()


if __name__ == "__main__":
    main()
