"""`pathmark robustness`: a table of attacks before the release."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._keys import echo_json, passphrase
from pathmark.cli._options import (
    json_option,
    key_option,
    n_texts_option,
    original_option,
    output_option,
    place_options,
    placed,
    seed_option,
    texts_option,
    trust_option,
)
from pathmark.cli._schemes import refuse_foreign, scheme_option
from pathmark.cli._schemes import robustness as robustness_of_scheme
from pathmark.cli._types import MODEL

if TYPE_CHECKING:
    from pathmark.front_door.robustness import Robustness

EXAMPLES = """\b
Examples:
  pathmark robustness marked --key owner.key --original bundled:tiny -o robustness --hours 2
  pathmark robustness marked --key owner.key --original bundled:tiny --sibling marked-for-alpha -o robustness
  pathmark robustness marked --key owner.key -o robustness --suite paper
  pathmark robustness marked --key owner.key -o robustness --only gptq --only fine-prune
  pathmark robustness marked --key owner.key --texts thief.txt --trials 25 -o robustness --json
  pathmark robustness marked-by-eaaw --scheme eaaw --key eaaw.key -o robustness-of-eaaw --suite paper
"""


@click.command(epilog=EXAMPLES)
@click.argument("model", type=MODEL)
@key_option("The key that marked MODEL.")
@scheme_option
@output_option("The folder for results; a run that was stopped goes on there.", new=False)
@click.option(
    "--suite", type=click.Choice(["core", "paper", "full"]), default="full", show_default=True,
    help="What a mark is meant to survive, the paper's attacks, or also what a thief would do besides.",
)  # fmt: skip
@click.option("--only", multiple=True, metavar="ATTACK", help="Only these attacks, or rows of the table; repeatable.")
@click.option("--skip", multiple=True, metavar="ATTACK", help="All but these, search and forgery included; repeatable.")
@click.option("--hours", type=float, help="The time budget. Rows that would exceed it are listed as not run.")
@original_option("The unmarked original, for attacks that compare with it and for the second reading.")
@click.option("--sibling", type=MODEL, help="Another licensee's copy, for a thief who has two.")
@texts_option("The thief's text")
@n_texts_option("How many of the key's texts are measured on.", least=4)
@click.option(
    "--trials", type=click.IntRange(0), default=0, show_default=True, help="Black-box trials after each attack."
)
@seed_option
@place_options
@trust_option
@json_option
def command(model: str, key_file: Path, output: Path, as_json: bool, **options: Any) -> None:
    """Carry out a suite of attacks on a marked model and measure what is left of the mark.

    Per attack and strength: WSR, exact p-value, the id, black-box replies, and the perplexity on clean text, which
    is what the thief pays. OUTPUT gets results.json, table.md and evidence.png. A run that was stopped goes on where
    it was. Attacks that win stand in the table as such; exit code 0 says only that everything was measured.
    """
    scheme = options.pop("scheme")
    if scheme is not None:
        refuse_foreign(scheme, "suite", "only", "skip", "hours", "original", "sibling", "texts", "n_texts", "seed")
    from pathmark.cli._progress import training_bar
    from pathmark.evaluate.stolen import RobustnessConfig
    from pathmark.front_door.robustness import RobustnessPlan, measure_robustness

    measures = {name: options.pop(name) for name in ("trials", "seed", "hours")}
    placement = placed(options)
    plan = RobustnessPlan(
        placement=placement, measure=RobustnessConfig(n_probes=options.pop("n_texts"), **measures), **options
    )
    if scheme is not None:
        robustness_of_scheme(scheme, model, key_file, output, plan, as_json)
        return
    with training_bar(quiet=as_json) as bar:
        measured = measure_robustness(model, key_file, output, plan, passphrase=passphrase(), progress=bar)
    if as_json:
        echo_json(measured.summary())
    else:
        _render(measured)


def _render(measured: Robustness) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from pathmark.reporting.robustness import HEADINGS, cells, forgeries, searches

    shown = Table(box=None, header_style="bold")
    for heading in HEADINGS:
        shown.add_column(heading)
    for row in measured.results.rows:
        *figures, verdict = (escape(cell) for cell in cells([row]).values())
        shown.add_row(row.case, *figures, f"[bold red]{verdict.replace('**', '')}[/]" if "**" in verdict else verdict)
    console = Console(soft_wrap=True)
    console.print(shown)
    for found in (searches([measured.results]), forgeries([measured.results])):
        click.echo(found, nl=False)
    click.echo(measured.words())
