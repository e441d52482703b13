"""`pathmark demo`: the main job on the bundled model, in ten to twenty minutes."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import click

from pathmark.cli._keys import echo_json, json_option
from pathmark.errors import EmbeddingError

EXAMPLES = """\b
Examples:
  pathmark demo
  pathmark demo -o demo-out --id 4711
  pathmark demo --json
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="New folder for what it makes. Default: temporary."
)
@click.option("--id", "number", type=click.IntRange(0), default=4711, show_default=True, help="Id to embed.")
@click.option("--steps", type=click.IntRange(1), help="Optimiser steps. Default: as in embed.")
@json_option
def command(output: Path | None, number: int, steps: int | None, as_json: bool) -> None:
    """Make a key, mark the bundled MoE, attack it, verify the marked, the attacked and the original model.

    Writes a summary page. Exit code 0 if the marked and the attacked model are found marked with the right id and the
    original is not, 1 otherwise.
    """
    from dataclasses import replace

    from pathmark.cli._progress import Bar
    from pathmark.embed import default_config
    from pathmark.evaluate.demo import run_demo
    from pathmark.report.page import summary_page

    if output is not None and output.exists():
        raise EmbeddingError(f"{output} already exists; choose another name, nothing is overwritten")
    folder = Path(tempfile.mkdtemp(prefix="pathmark-demo-")) if output is None else output
    folder.mkdir(parents=True, exist_ok=True)
    config = default_config()
    if steps is not None:
        config = replace(config, loop=replace(config.loop, steps=steps))
    with Bar(quiet=as_json) as bar:
        say = (lambda text: None) if as_json else (lambda text: click.echo(text))
        results = run_demo(folder, config, number=number, progress=bar, say=say)
    (folder / "summary.html").write_text(summary_page(results), encoding="utf-8")
    (folder / "results.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    if as_json:
        echo_json(results)
    else:
        _render(results, folder)
    found = results["verify"]
    good = all(found[name]["marked"] and found[name]["id"] == number for name in ("marked", "attacked"))
    sys.exit(0 if good and not found["original"]["marked"] else 1)


def _render(results: dict[str, object], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    embed, verify, words = (results[name] for name in ("embed", "verify", "words"))
    assert isinstance(embed, dict)
    assert isinstance(verify, dict)
    assert isinstance(words, dict)
    console = Console(soft_wrap=True)
    table = Table(box=None, header_style="bold")
    for heading in ("", "marked model", "permuted, 4 bit", "original model"):
        table.add_column(heading, justify="left" if not heading else "right")
    shown = [verify[name] for name in ("marked", "attacked", "original")]
    table.add_row("verdict", *("marked" if v["marked"] else "not marked" for v in shown))
    table.add_row("exact p-value", *(f"{v['p_value']:.1e}" for v in shown))
    table.add_row("WSR", *(f"{100 * v['wsr']:.0f} %" for v in shown))
    table.add_row("id", *(str(v["id"]) if v["id"] is not None else "-" for v in shown))
    for name, key in (("perplexity, clean text", "clean_ppl"), ("perplexity, triggered", "triggered_ppl")):
        table.add_row(name, f"{embed[key][1]:.2f}", "", f"{embed[key][0]:.2f}")
    table.add_row("trigger scan", f"{embed['scan']['hits']} of {embed['scan']['tried']:,} fire", "", "")
    console.print(table)
    for name in ("marked", "attacked", "original"):
        console.print(f"[bold]{name.capitalize()}[/]: {words[name]}")
    if embed["problems"]:
        console.print(f"[bold]Not fit for release:[/] {'; '.join(embed['problems'])}")
    console.print(f"Summary page: {folder / 'summary.html'}")
