"""`pathmark verify-routes`: is a key's mark in routes that an engine recorded?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pathmark.cli._keys import passphrase
from pathmark.cli._options import (
    evidence_options,
    json_option,
    judge_options,
    judged_by,
    key_option,
    log_options,
    no_align_option,
)
from pathmark.cli._types import Existing

EXAMPLES = """\b
Examples:
  pathmark verify-routes recorded.jsonl --key owner.key
  pathmark verify-routes recorded.npz --key owner.key --log case-18 --obtained "from our own server"
"""


@click.command(epilog=EXAMPLES)
@click.argument("file", type=Existing("recorded routes"))
@key_option()
@no_align_option
@judge_options()
@log_options
@evidence_options
@json_option
def command(file: Path, key_file: Path, as_json: bool, **options: Any) -> None:
    """Test whether a key's mark is in the routes that a serving engine recorded for `pathmark probes`.

    The same exact test as on weights, without the weights (docs/routes.md). Exit code 0: marked, 1: not marked,
    2: cannot decide or failed.
    """
    from pathmark.cli._verdict import finish
    from pathmark.front_door.verify import RoutesConfig, verify_routes

    config = RoutesConfig(align=not options["no_align"], **judged_by(options))
    finish(verify_routes(file, key_file, config, passphrase=passphrase()), options, as_json)
