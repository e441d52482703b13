"""`pathmark card`: what an owner can publish with a model."""

from __future__ import annotations

from pathlib import Path

import click

from pathmark.cli._keys import echo_done
from pathmark.cli._options import json_option
from pathmark.cli._types import COMMITMENT, NEW

EXAMPLES = """\b
Examples:
  pathmark card release.commitment.json
  pathmark card release.commitment.json -o OWNERSHIP.md --badge pathmark.svg
"""


@click.command(epilog=EXAMPLES)
@click.argument("commitment", type=COMMITMENT)
@click.option("-o", "--output", type=NEW, help="Write the section into this file instead of printing it.")
@click.option("--badge", "badge_file", type=NEW, help="Also draw a badge into this SVG file.")
@json_option
def command(commitment: Path, output: Path | None, badge_file: Path | None, as_json: bool) -> None:
    """Write a section for a model's card, and a badge, from a published commitment.

    The key is not needed, so nothing of it can be given away: the section says who committed to what and when, and how
    anybody checks it.
    """
    from pathmark.front_door.card import card

    made = card(commitment, output, badge_file)
    echo_done(made.words(), made.summary(), as_json)
