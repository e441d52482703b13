"""`pathmark registry`: who got which id."""

from __future__ import annotations

from pathlib import Path

import click

from pathmark.cli._keys import echo_json
from pathmark.cli._options import PATH, Group, json_option


@click.group(cls=Group)
def command() -> None:
    """Show who got which id."""


EXAMPLES = """\b
Examples:
  pathmark registry list licensees.db
  pathmark registry list licensees.db --json
"""


@command.command("list", epilog=EXAMPLES)
@click.argument("registry", type=PATH)
@json_option
def list_(registry: Path, as_json: bool) -> None:
    """List all issued ids, and in how many layers the nearest two differ."""
    from pathmark.keys import Registry

    book = Registry(registry)
    entries, distance, fingerprint = book.entries(), book.distance(), book.fingerprint()
    if as_json:
        rows = [
            {
                "ordinal": e.ordinal,
                "id": e.id,
                "licensee": e.licensee,
                "issued": e.issued,
                "distance": e.distance,
            }
            for e in entries
        ]
        echo_json({"fingerprint": fingerprint, "distance": distance, "issued": rows})
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("", justify="right")
    table.add_column("id", justify="right")
    table.add_column("licensee")
    table.add_column("issued")
    for entry in entries:
        table.add_row(str(entry.ordinal), str(entry.id), escape(entry.licensee), entry.issued)
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(f"{len(entries)} ids of key {fingerprint}; the nearest two differ in {distance} layers.")
