"""`pathmark trace`: which licensee's copy is this?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._keys import echo_json, passphrase
from pathmark.cli._options import (
    commitment_for_evidence,
    evidence_options,
    json_option,
    key_option,
    look_options,
    original_option,
    registry_option,
    significance_option,
    speaks,
    suspects_option,
    write_evidence,
)
from pathmark.cli._types import MODEL
from pathmark.cli._verdict import GLOSSARY_AT, render_words

if TYPE_CHECKING:
    from pathmark.front_door.trace import Traced

EXAMPLES = """\b
Examples:
  pathmark trace ./leaked --key master.key --registry licensees.db
  pathmark trace ./leaked --key master.key --registry licensees.db --suspects 3 --json
  pathmark trace ./leaked --key master.key --registry licensees.db --evidence case-18.zip
  pathmark trace ./pruned-leak --key master.key --registry licensees.db --original ./our-unmarked-original
"""


@click.command(epilog=EXAMPLES)
@click.argument("suspect", type=MODEL)
@key_option("The master key.")
@registry_option
@original_option("The unmarked original: the suspect's marked layers are also read behind its lower layers.")
@look_options
@significance_option
@suspects_option
@commitment_for_evidence
@evidence_options
@json_option
def command(suspect: str, key_file: Path, registry: Path, as_json: bool, **options: Any) -> None:
    """Name the licensee whose copy a suspect comes from, from its weights.

    Every licensee's path is tested on one measurement. One is named only if its p-value holds against all
    licensees compared, and still holds if a rival's mark were in the model. The owner could have made any licensee's
    copy, so a name tells the owner where to look. What is seen only behind the --original is a lead and names nobody.
    Exit code 0: one or several named, 1: nobody's mark, 2: marked, but nobody can be named, or failed.
    """
    from pathmark.cli._progress import Bar
    from pathmark.cli.verify import examine_config
    from pathmark.front_door.trace import TraceConfig, trace

    names = ("original", "base", "texts", "significance", "suspects", "commitment")
    chosen = {name: options[name] for name in names}
    config = TraceConfig(examine=examine_config(options), sandbox=not options["no_sandbox"], **chosen)
    with Bar(quiet=as_json or not speaks()) as bar:
        traced = trace(suspect, key_file, registry, config, passphrase=passphrase(), progress=bar)
    finish(traced, suspect, options, as_json)


def finish(traced: Traced, suspect: str, options: dict[str, Any], as_json: bool) -> None:
    """Show who was named, exit accordingly; of several processes the first one does."""
    if not speaks():
        sys.exit(0)
    if as_json:
        echo_json({"suspect": suspect, **traced.summary()})
    else:
        _render(traced)
    write_evidence(traced, options)
    sys.exit({"licensee": 0, "several": 0, "none": 1, "ambiguous": 2, "lead": 2}[traced.decision])


def _render(traced: Traced) -> None:
    """The decision in words, then the strongest licensees."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=True)
    table = Table(box=None, header_style="bold")
    for heading in ("licensee", "id", "p, uncharged"):
        table.add_column(heading, justify="left" if heading == "licensee" else "right")
    for name, p in traced.result.ranking:
        table.add_row(escape(name), str(traced.ids[name]), str(p))
    render_words(traced.wording(), console)
    console.print(table)
    console.print(GLOSSARY_AT)
