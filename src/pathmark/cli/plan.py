"""`pathmark plan`: what the work on a model takes, before anything is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._keys import echo_json
from pathmark.cli._options import json_option, trust_option

if TYPE_CHECKING:
    from pathmark.front_door.plan import Planned

EXAMPLES = """\b
Examples:
  pathmark plan Qwen3-30B-A3B --devices 8x80GB --tflops 150
  pathmark plan Mixtral-8x7B --devices 4x80GB --tflops 150 --recompute
  pathmark plan ./my-moe --dtype fp32 --json
"""


@click.command(epilog=EXAMPLES)
@click.argument("model")
@click.option("--devices", help="How many devices with how much memory, such as 8x80GB. Default: this machine.")
@click.option(
    "--tflops", type=click.FloatRange(0, min_open=True),
    help="What one device really does, in 10^12 operations per second. Default: measured on this machine.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True,
    help="The type of weights that are not trained.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(1), help="How many optimiser steps of the embedding.")
@click.option("--batch-size", type=click.IntRange(3), default=16, show_default=True, help="How many rows per step.")
@click.option("--seq-len", type=click.IntRange(16), default=128, show_default=True, help="Text tokens per row.")
@click.option(
    "--width", type=click.IntRange(1), default=2, show_default=True, help="How many target experts per layer."
)
@click.option("--recompute", is_flag=True, help="Keep no activations for the backward pass.")
@click.option(
    "--suite", type=click.Choice(["core", "paper", "full"]), default="full", show_default=True,
    help="The attacks of the robustness run.",
)  # fmt: skip
@trust_option
@json_option
def command(model: str, as_json: bool, **options: Any) -> None:
    """Say what embedding, verifying and a robustness run take: memory, time and disk, from a config alone.

    MODEL is a folder, a hub id, bundled:tiny, or one of Qwen1.5-MoE-A2.7B, Mixtral-8x7B, Phi-3.5-MoE and Qwen3-30B-A3B,
    whose shapes are known without a download. `pathmark embed --estimate` measures a few steps instead.
    """
    from pathmark.front_door.plan import PlanConfig, plan

    planned = plan(model, PlanConfig(**options))
    if as_json:
        echo_json(planned.summary())
    else:
        _render(planned)


def duration(seconds: float) -> str:
    """In the unit that a person would take."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.2g} {unit}" if seconds < 100 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.2g} s"


def _render(planned: Planned) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for heading in ("", "memory per device", "tokens per step", "arithmetic", "disk", "host memory or disk"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, job in planned.summary()["jobs"].items():
        short = "" if job["fits"] else " (too much)"
        table.add_row(
            name, f"{job['device_bytes'] / 1e9:.1f} GB{short}", f"{job['tokens_per_step']:,}",
            duration(3600 * job["hours"]),
            f"{job['disk_bytes'] / 1e9:.1f} GB", f"{sum(job['host'].values()) / 1e9:.1f} GB",
        )  # fmt: skip
    console = Console(soft_wrap=True)
    console.print(table, highlight=False)
    console.print(planned.words(), highlight=False)
