"""`pathmark reproduce`: the paper's tables and figures by one command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pathmark.cli._keys import echo_json
from pathmark.cli._options import PATH, json_option
from pathmark.cli._types import MODEL

EXAMPLES = """\b
Examples:
  pathmark reproduce list
  pathmark reproduce tab-whitebox
  pathmark reproduce all --quick --corpora corpora.toml
  pathmark reproduce fig-finetuning --model ./my-moe --corpora corpora.toml --keys 3 -o my-moe-results
"""


@click.command(epilog=EXAMPLES)
@click.argument("name")
@click.option("--model", type=MODEL, default="bundled:tiny", show_default=True, help="The unmarked model.")
@click.option("--keys", type=click.IntRange(1), help="How many keys. Default: 3, or 1 with --quick.")
@click.option(
    "-o", "--output", type=PATH, help="The folder for results. Default: reproduced, or reproduced-quick with --quick."
)
@click.option("--quick", is_flag=True, help="Few texts and few steps: whether it works, not how well.")
@click.option("--corpora", type=PATH, metavar="FILE", help="A TOML file that names files of texts; see the example.")
@json_option
def command(name: str, output: Path | None, as_json: bool, **options: Any) -> None:
    """Measure a table or figure of the paper on a model; `list` shows them, `all` measures every one.

    NAME is an experiment, list or all. The folder gets a result file, a table and a plot for each, with the paper's
    printed numbers beside ours. A run that was stopped goes on, and what is there is not measured again. Nothing is
    downloaded: texts are files that you name. Exit code 0 says that everything was tried; tables say what is missing.
    """
    if name == "list":
        _list(as_json)
        return
    from pathmark.cli._progress import training_bar
    from pathmark.results.paper import find_paper

    if name != "all":
        find_paper(name)  # a wrong name is told before anything heavy is loaded
    from pathmark.front_door.reproduce import ReproducePlan, reproduce

    folder = output or Path("reproduced-quick" if options["quick"] else "reproduced")
    with training_bar(quiet=as_json) as bar:
        done = reproduce(name, folder, ReproducePlan(**options), progress=bar)
    if as_json:
        echo_json(done.summary())
    else:
        click.echo(done.page())
        click.echo(done.words())


def _list(as_json: bool) -> None:
    from pathmark.results.paper import papers

    if as_json:
        known = ("name", "title", "place", "minutes", "quick")
        echo_json({"experiments": [{name: getattr(one, name) for name in known} for one in papers().values()]})
        return
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, header_style="bold")
    for heading in ("name", "minutes", "quick", "what it measures"):
        shown.add_column(heading, justify="right" if heading in ("minutes", "quick") else "left")
    for one in papers().values():
        shown.add_row(one.name, f"{one.minutes:g}", f"{one.quick:g}", one.title)
    minutes, quick = (sum(getattr(one, name) for one in papers().values()) for name in ("minutes", "quick"))
    shown.add_row("all", f"{minutes:.0f}", f"{quick:.0f}", "every one")
    Console(soft_wrap=True).print(shown)
    click.echo(
        "Minutes are estimates for bundled:tiny with three keys on two idle cores. The first experiment that needs the "
        "marked copies makes them, which takes 50 more; --quick counts them in."
    )
