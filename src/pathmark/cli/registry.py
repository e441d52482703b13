"""`pathmark registry`: who got which id."""

from __future__ import annotations

from pathlib import Path

import click

from pathmark.cli._keys import echo_json
from pathmark.cli._options import PATH, Group, json_option


@click.group(cls=Group)
def command() -> None:
    """Show who got which id, and whether somebody altered the list."""


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


CHECK_EXAMPLES = """\b
Examples:
  pathmark registry check licensees.db
  pathmark registry check licensees.db --json
"""


@command.command("check", epilog=CHECK_EXAMPLES)
@click.argument("registry", type=PATH)
@json_option
def check(registry: Path, as_json: bool) -> None:
    """Check that every row is as the owner's key signed it; an altered or missing one is named.

    Exit code 0: the whole list holds, 1: a row does not. That rows at the end are missing, only a later copy shows.
    """
    from pathmark.keys import Registry

    book = Registry(registry)
    problems, count = book.problems(), len(book.entries())
    if as_json:
        echo_json({"holds": not problems, "problems": problems, "issued": count, "fingerprint": book.fingerprint()})
    else:
        click.echo(
            "\n".join(problems) if problems else f"All {count} rows are as key {book.fingerprint()} signed them."
        )
    if problems:
        raise SystemExit(1)
