"""`pathmark demo`: the main job on the bundled model, in a few minutes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pathmark.cli._keys import echo_json
from pathmark.cli._options import PATH, is_quiet, json_option

if TYPE_CHECKING:
    from pathmark.front_door.demo import Demonstration

FOLDER = "pathmark-demo"
EXAMPLES = """\b
Examples:
  pathmark demo
  pathmark demo -o my-demo
  pathmark demo --json
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "-o", "--output", type=PATH,
    help=f"A new folder for what it makes. Default: {FOLDER}, or {FOLDER}-2 and so on where that exists.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(1), help="How many optimiser steps. Default: as in embed.")
@json_option
def command(output: Path | None, steps: int | None, as_json: bool) -> None:
    """Mark a licensee's copy of the bundled MoE, let a thief disguise it, find the mark and name the licensee.

    Everything is left in a folder, with a report. Exit code 0 if the copy is fit for release, the mark is found in the
    copy and in the thief's model and in no other, and the right licensee is named; 1 otherwise.
    """
    from pathmark.cli._progress import training_bar
    from pathmark.front_door.demo import demo

    folder = output or next(path for path in _names() if not path.exists())
    with training_bar(quiet=as_json) as bar:
        shown = demo(folder, steps=steps, progress=bar, say=None if as_json or is_quiet() else click.echo)
    if as_json:
        echo_json(shown.summary())
    else:
        _render(shown)
    sys.exit(0 if shown.good else 1)


def _names() -> Iterator[Path]:
    yield Path(FOLDER)
    for number in count(2):
        yield Path(f"{FOLDER}-{number}")


def _program() -> str:
    """How a shell without an activated environment finds this program, as after `make demo`."""
    return "pathmark" if shutil.which("pathmark") else os.path.relpath(sys.argv[0])


def _render(shown: Demonstration) -> None:
    from rich.console import Console
    from rich.table import Table

    folder, embed, verify = shown.folder, shown.results["embed"], shown.results["verify"]
    console = Console(soft_wrap=True, highlight=False)
    table = Table(box=None, header_style="bold")
    table.add_column("")
    for name in verify:
        table.add_column(name, justify="right")
    found = list(verify.values())
    table.add_row("our mark", *("found" if v["marked"] else "not found" for v in found))
    table.add_row("chance of that by accident", *(f"{v['p_value']:.1e}" for v in found))
    table.add_row("texts that take the path", *(f"{100 * v['wsr']:.0f} %" for v in found))
    table.add_row("id read", *(str(v["id"]) if v["id"] is not None and v["marked"] else "-" for v in found))
    console.print(table)
    console.print(shown.words())
    if embed["fit"]:
        console.print("[bold green]Fit for release: yes.[/]")
    else:
        console.print(f"[bold red]Fit for release: no:[/] {'; '.join(embed['problems'])}")
    console.print(
        "\nNot shown here: dating the key (pathmark commit), without which no third party need believe a verdict; "
        "harder attacks (pathmark robustness); a mark that an API answers with (pathmark embed --black-box).\n"
        "\nTry it yourself:\n"
        f'  export PATHMARK_PASSPHRASE="$(cat {folder}/passphrase.txt)"\n'
        f"  {_program()} verify {folder}/stolen --key {folder}/beta.key\n"
        f"  {_program()} trace {folder}/stolen --key {folder}/owner.key --registry {folder}/licensees.db\n"
        f"  xdg-open {folder}/report.html"
    )
