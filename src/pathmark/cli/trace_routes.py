"""`pathmark trace-routes`: whose copy did an engine run?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pathmark.cli._keys import passphrase
from pathmark.cli._options import (
    commitment_for_evidence,
    evidence_options,
    json_option,
    key_option,
    registry_option,
    significance_option,
    suspects_option,
)
from pathmark.cli._types import Existing

EXAMPLES = """\b
Examples:
  pathmark trace-routes recorded.jsonl --key master.key --registry licensees.db
  pathmark trace-routes recorded.jsonl --key master.key --registry licensees.db --json
"""


@click.command(epilog=EXAMPLES)
@click.argument("file", type=Existing("recorded routes"))
@key_option("The master key.")
@registry_option
@significance_option
@suspects_option
@commitment_for_evidence
@evidence_options
@json_option
def command(file: Path, key_file: Path, registry: Path, as_json: bool, **options: Any) -> None:
    """Name the licensee whose copy a serving engine ran, from the routes it recorded for `pathmark probes`.

    The same rule and exit codes as `pathmark trace`.
    """
    from pathmark.cli.trace import finish
    from pathmark.front_door.trace import TraceRoutesConfig, trace_routes

    config = TraceRoutesConfig(**{name: options[name] for name in ("significance", "suspects", "commitment")})
    finish(trace_routes(file, key_file, registry, config, passphrase=passphrase()), str(file), options, as_json)
