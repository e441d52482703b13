"""`pathmark simulate-latency`: what a mark costs where experts are spread over devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._keys import echo_json, passphrase
from pathmark.cli._options import json_option, key_option, n_texts_option, place_options, placed, texts_option
from pathmark.cli._types import MODEL

if TYPE_CHECKING:
    from pathmark.front_door.latency import SimulatedLatency

EXAMPLES = """\b
Examples:
  pathmark simulate-latency ./marked --key owner.key --devices 8
  pathmark simulate-latency ./marked --key owner.key --devices 8 --costs qwen1.5-moe --placement balanced
"""


@click.command(epilog=EXAMPLES)
@click.argument("model", type=MODEL)
@key_option()
@click.option("--devices", type=click.IntRange(1), default=8, show_default=True, help="Devices that share the experts.")
@click.option(
    "--placement", type=click.Choice(["contiguous", "round-robin", "balanced"]), default="contiguous",
    show_default=True, help="Which expert is on which device.",
)  # fmt: skip
@click.option(
    "--costs", type=click.Choice(["model", "qwen1.5-moe"]), default="model", show_default=True,
    help="Whose layer sizes the simulated costs follow.",
)  # fmt: skip
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Texts per simulated batch.")
@texts_option("The texts to route")
@n_texts_option()
@click.option("--tokens", type=click.IntRange(4), default=256, show_default=True, help="Tokens of each text.")
@place_options
@json_option
def command(model: str, key_file: Path, as_json: bool, **options: Any) -> None:
    """Simulate what a mark costs where a model's experts are spread over devices.

    Records the routing of triggered and clean texts and adds up assumed costs. A prediction, not a test.
    """
    from pathmark.front_door.latency import SimulationConfig, simulate_latency

    config = SimulationConfig(run_on=placed(options), **options)
    simulated = simulate_latency(model, key_file, config, passphrase=passphrase())
    if as_json:
        echo_json(simulated.summary())
    else:
        _render(simulated)


def _render(simulated: SimulatedLatency) -> None:
    from rich.console import Console
    from rich.table import Table

    summary = simulated.summary()
    table = Table(box=None, header_style="bold")
    for heading in ("layer", "slowdown", "paper's margin"):
        table.add_column(heading, justify="right")
    for layer, share in summary["overhead_per_layer"].items():
        margin = summary["paper_margin"].get(layer)
        table.add_row(str(layer), f"{100 * share:+.1f} %", "" if margin is None else f"{margin:+.2f}")
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(simulated.words(), highlight=False)
