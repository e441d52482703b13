"""`pathmark inspect`: what a model is made of, without loading its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._keys import echo_json
from pathmark.cli._options import json_option, sandbox_option, trust_option
from pathmark.cli._types import MODEL

if TYPE_CHECKING:
    from pathmark.front_door.inspection import Inspection

EXAMPLES = """\b
Examples:
  pathmark inspect bundled:tiny
  pathmark inspect ./Qwen1.5-MoE-A2.7B --width 2 --json
  pathmark inspect mistralai/Mixtral-8x7B-v0.1 --watermark-layers 4
"""


@click.command(epilog=EXAMPLES)
@click.argument("model", type=MODEL)
@click.option(
    "--width", default=2, show_default=True, type=click.IntRange(1), help="How many target experts per layer."
)
@click.option(
    "--watermark-layers",
    type=click.IntRange(1),
    help="How many of the last routed layers. Default: the recommended ones.",
)
@trust_option
@sandbox_option
@json_option
def command(model: str, as_json: bool, no_sandbox: bool, **options: Any) -> None:
    """Show a model's routers, its capacity and what PathMark can do with it.

    Reads the config and the headers of the weight files; loads no weights.
    """
    from pathmark.front_door.inspection import InspectConfig, inspect_model

    inspected = inspect_model(model, InspectConfig(sandbox=not no_sandbox, **options))
    if as_json:
        echo_json(inspected.summary())
    else:
        _render(inspected)


def _render(inspected: Inspection) -> None:
    from rich.console import Console
    from rich.table import Table

    console, summary = Console(), inspected.summary()
    console.print(
        f"[bold]{summary['source']}[/]  {summary['architecture']}, {summary['parameters']:,} parameters, "
        f"vocabulary {summary['vocabulary']:,}, weights {summary['weights']}"
    )
    table = Table(box=None, header_style="bold")
    for heading in ("layers", "experts", "top-k", "router", "watermark"):
        table.add_column(heading, justify="left" if heading in ("layers", "router") else "right")
    for first, last, facts, marked in _runs(summary["layers"], set(summary["watermark_layers"])):
        span = str(first) if first == last else f"{first}-{last}"
        dense = facts["experts"] == 0
        table.add_row(
            span,
            "-" if dense else str(facts["experts"]),
            "-" if dense else str(facts["top_k"]),
            facts["kind"],
            "yes" if marked else "",
        )
    console.print(table)
    console.print(inspected.words())


def _runs(layers: list[dict[str, Any]], marked: set[int]) -> list[tuple[int, int, dict[str, Any], bool]]:
    """Neighbouring layers of the same make, as one row."""
    runs: list[tuple[int, int, dict[str, Any], bool]] = []
    for facts in layers:
        make = {key: value for key, value in facts.items() if key != "layer"}
        here = facts["layer"] in marked
        if runs and runs[-1][2] == make and runs[-1][3] == here:
            runs[-1] = (runs[-1][0], facts["layer"], make, here)
        else:
            runs.append((facts["layer"], facts["layer"], make, here))
    return runs
