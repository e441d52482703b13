"""`pathmark demo`: the main job on the bundled model, in a few minutes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from itertools import count
from pathlib import Path
from typing import Any

import click

from pathmark.cli._keys import echo_json, json_option
from pathmark.errors import EmbeddingError

FOLDER = "pathmark-demo"
EXAMPLES = """\b
Examples:
  pathmark demo
  pathmark demo -o my-demo
  pathmark demo --json
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path),
    help=f"New folder for what it makes. Default: {FOLDER}, or {FOLDER}-2 and so on where that exists.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(1), help="Optimiser steps. Default: as in embed.")
@json_option
def command(output: Path | None, steps: int | None, as_json: bool) -> None:
    """Mark a licensee's copy of the bundled MoE, let a thief disguise it, find the mark and name the licensee.

    Everything is left in a folder, with a report. Exit code 0 if the copy is fit for release, the mark is found in the
    copy and in the thief's model and in no other, and the right licensee is named; 1 otherwise.
    """
    from dataclasses import replace

    from pathmark.cli._progress import Bar
    from pathmark.embedding import default_config
    from pathmark.evaluate.demo import ORIGINAL, OUR_COPY, STOLEN, STRANGER, run_demo
    from pathmark.reporting.page import summary_page
    from pathmark.training import keep_freed_memory

    keep_freed_memory()
    if output is not None and output.exists():
        raise EmbeddingError(f"{output} already exists; choose another name, nothing is overwritten")
    folder = output or next(path for path in _names() if not path.exists())
    folder.mkdir(mode=0o700, parents=True)
    config = default_config()
    if steps is not None:
        config = replace(config, loop=replace(config.loop, steps=steps))
    with Bar(quiet=as_json) as bar:
        say = (lambda text: None) if as_json else (lambda text: click.echo(text))
        results = run_demo(folder, config, progress=bar, say=say)
    (folder / "results.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    (folder / "report.html").write_text(summary_page(results), encoding="utf-8")
    if as_json:
        echo_json(results)
    else:
        _render(results, folder)
    found, traced = results["verify"], results["trace"]
    good = (
        results["embed"]["fit"]
        and all(found[name]["marked"] for name in (OUR_COPY, STOLEN))
        and not any(found[name]["marked"] for name in (ORIGINAL, STRANGER))
        and traced["licensee"] == traced["leak"]
    )
    sys.exit(0 if good else 1)


def _names() -> Any:
    yield Path(FOLDER)
    for number in count(2):
        yield Path(f"{FOLDER}-{number}")


def _program() -> str:
    """How a shell without an activated environment finds this program, as after `make demo`."""
    return "pathmark" if shutil.which("pathmark") else os.path.relpath(sys.argv[0])


def _render(results: dict[str, Any], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    embed, verify = results["embed"], results["verify"]
    console = Console(soft_wrap=True, highlight=False)
    table = Table(box=None, header_style="bold")
    table.add_column("")
    for name in verify:
        table.add_column(name, justify="right")
    shown = list(verify.values())
    table.add_row("our mark", *("found" if v["marked"] else "not found" for v in shown))
    table.add_row("chance of that by accident", *(f"{v['p_value']:.1e}" for v in shown))
    table.add_row("texts that take the path", *(f"{100 * v['wsr']:.0f} %" for v in shown))
    table.add_row("id read", *(str(v["id"]) if v["id"] is not None and v["marked"] else "-" for v in shown))
    console.print(table)
    console.print(f"Whose copy leaked? {results['trace']['words']}")
    before, after = embed["clean_ppl"]
    console.print(
        f"What the mark costs: perplexity on ordinary text {before:.2f} -> {after:.2f} "
        f"({100 * (after / before - 1):+.2f} %)."
    )
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
