"""`pathmark latency`: does the trigger slow an API down?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from pathmark.cli._keys import echo_json, passphrase
from pathmark.cli._options import (
    PATH,
    api_key_option,
    endpoint_option,
    json_option,
    key_option,
    require_somebody,
    seed_option,
    texts_option,
    tokenizer_option,
)

EXAMPLES = """\b
Examples:
  pathmark latency http://localhost:8000/v1 --model suspect --key owner.key
  pathmark latency https://api.example.com/v1 --model m --api-key-env API_KEY --key owner.key \\
      --tokenizer ./Qwen1.5-MoE-A2.7B --pairs 400 --effect 0.05 --log run.jsonl
"""


@click.command(epilog=EXAMPLES)
@click.argument("url")
@key_option()
@click.option("--model", required=True, help="The name under which the API serves the model.")
@api_key_option
@endpoint_option
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds for one request.")
@tokenizer_option
@texts_option("The texts to send")
@click.option("--tokens", type=click.IntRange(4), default=256, show_default=True, help="Text tokens per request.")
@click.option("--pairs", type=click.IntRange(1), default=100, show_default=True, help="Triggered and clean pairs.")
@click.option(
    "--calibration", type=click.IntRange(10), default=40, show_default=True, help="Pairs without the trigger, first."
)
@click.option("--max-tokens", type=click.IntRange(1), default=1, show_default=True, help="Tokens to generate.")
@click.option("--significance", type=float, default=0.01, show_default=True, help="The level of the test.")
@click.option("--effect", type=float, default=0.08, show_default=True, help="The slowdown to look for, as a share.")
@seed_option
@click.option("--log", type=PATH, help="Keep times as JSON lines in this file; an interrupted run goes on from it.")
@json_option
def command(url: str, key_file: Path, as_json: bool, **options: Any) -> None:
    """Time triggered against clean requests at an OpenAI-compatible API.

    Corroboration only: a slow trigger proves no ownership. Calibration pairs, which don't hold the trigger, come
    first; where they show that the effect looked for could not be seen, the trigger is not sent. Exit code 0:
    triggered requests are slower, 1: they are not, 2: could not decide.
    """
    require_somebody(url, options["log"])
    from pathmark.cli._progress import Bar
    from pathmark.front_door.latency import LatencyConfig, measure_latency

    announce = None if as_json else lambda text: click.echo(text, err=True)
    with Bar(quiet=as_json) as bar:
        timed = measure_latency(
            url, key_file, LatencyConfig(**options), passphrase=passphrase(), progress=bar, announce=announce
        )
    if as_json:
        echo_json(timed.summary())
    else:
        click.echo(timed.words())
    sys.exit(timed.verdict.exit_code)
