"""`pathmark doctor`: is everything there?"""

from __future__ import annotations

import sys

import click

from pathmark.cli._keys import echo_done
from pathmark.cli._options import json_option

EXAMPLES = """\b
Examples:
  pathmark doctor
  pathmark doctor --json
"""


@click.command(epilog=EXAMPLES)
@json_option
def command(as_json: bool) -> None:
    """Show versions, devices, memory and optional parts, and what to install.

    Nothing is changed and nothing is fetched. Exit code 0: everything that is needed is there, 2: something is missing.
    """
    from pathmark.front_door.doctor import doctor

    found = doctor()
    echo_done(found.words(), found.summary(), as_json)
    sys.exit(2 if found.problems else 0)
