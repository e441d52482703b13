"""`pathmark inspect`: what a model is made of, without loading its weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

EXAMPLES = """\b
Examples:
  pathmark inspect bundled:tiny
  pathmark inspect ./Qwen1.5-MoE-A2.7B --width 2 --json
  pathmark inspect mistralai/Mixtral-8x7B-v0.1 --watermark-layers 4
"""


@click.command(epilog=EXAMPLES)
@click.argument("model")
@click.option("--width", default=2, show_default=True, type=click.IntRange(1), help="Target experts per layer.")
@click.option(
    "--watermark-layers",
    type=click.IntRange(1),
    help="How many of the last routed layers. Default: recommended.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run the model folder's own Python code.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, width: int, watermark_layers: int | None, trust_remote_code: bool, as_json: bool) -> None:
    """Show a model's routers, its capacity and what PathMark can do with it.

    Reads the config and the headers of the weight files; loads no weights.
    """
    summary = summarise(model, width, watermark_layers, trust_remote_code)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        _render(summary)


def summarise(model: str, width: int, watermark_layers: int | None, trust_remote_code: bool) -> dict[str, Any]:
    """The report with capacity and evidence for a path width."""
    from pathmark.errors import CapacityError
    from pathmark.models import inspect_model
    from pathmark.stats import capacity_bits, evidence_bits

    report = inspect_model(model, trust_remote_code=trust_remote_code)
    routed = [facts.layer for facts in report.routed]
    chosen = list(report.recommended) if watermark_layers is None else routed[-watermark_layers:]
    if watermark_layers is not None and len(chosen) < watermark_layers:
        raise CapacityError(f"expected at most {len(routed)} watermark layers, got {watermark_layers}")
    narrow = [layer for layer in chosen if report.facts(layer).experts < 2 * width]
    if narrow:
        have = report.facts(narrow[0]).experts
        raise CapacityError(
            f"width {width} needs {2 * width} experts, layer {narrow[0]} has {have}; choose a smaller --width"
        )
    return {
        "source": report.source,
        "model_type": report.model_type,
        "architecture": report.architecture,
        "parameters": report.parameters,
        "vocabulary": report.vocabulary,
        "weights": report.weights,
        "layers": [asdict(facts) for facts in report.layers],
        "watermark_layers": chosen,
        "width": width,
        "id_bits": sum(capacity_bits(report.facts(layer).experts, width, 1) for layer in chosen),
        "evidence_bits": sum(evidence_bits(report.facts(layer).experts, width, 1) for layer in chosen),
        "can": {
            "embed": report.weights != "absent",
            "verify": report.weights != "absent",
            "stream": report.weights == "ok",
        },
    }


def _render(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
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
    console.print(
        f"Path of width {summary['width']} through {len(summary['watermark_layers'])} layers: "
        f"ids {summary['id_bits']:.1f} bits, evidence {summary['evidence_bits']:.1f} bits "
        f"(smallest p-value {2.0 ** -summary['evidence_bits']:.1e}), before any pool rule."
    )
    can = ", ".join(f"{verb} {'yes' if able else 'no'}" for verb, able in summary["can"].items())
    console.print(f"PathMark can: {can}.")


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
