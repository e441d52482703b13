"""`pathmark registry`: who got which id."""

from __future__ import annotations

from pathlib import Path

import click

from pathmark.cli._keys import echo_done, echo_json
from pathmark.cli._options import PATH, Group, json_option, output_option


@click.group(cls=Group)
def command() -> None:
    """Show who got which id, whether somebody altered the list, and confirm a copy as its licensee."""


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
  pathmark registry check licensees.db --receipt alpha.signed --receipt beta.signed --json
"""


@command.command("check", epilog=CHECK_EXAMPLES)
@click.argument("registry", type=PATH)
@click.option("--receipt", "receipts", type=PATH, multiple=True, help="A countersigned receipt; repeatable.")
@json_option
def check(registry: Path, receipts: tuple[Path, ...], as_json: bool) -> None:
    """Check that every row is as the owner's key signed it; an altered or missing one is named.

    With --receipt also that a licensee signed exactly this row. Exit code 0: everything holds, 1: something does not.
    That rows at the end are missing, only a later copy or a receipt shows.
    """
    from pathmark.front_door.licensing import check_registry

    found = check_registry(registry, receipts)
    if as_json:
        echo_json(found.summary())
    else:
        click.echo(found.words())
    if not found.holds:
        raise SystemExit(1)


SIGN_EXAMPLES = """\b
Examples:
  openssl genpkey -algorithm ed25519 -out licensee.pem && chmod 600 licensee.pem
  pathmark registry countersign alpha.receipt --signing-key licensee.pem -o alpha.signed
"""


@command.command("countersign", epilog=SIGN_EXAMPLES)
@click.argument("receipt", type=PATH)
@click.option("--signing-key", required=True, type=PATH, help="The licensee's Ed25519 key, a PEM file.")
@output_option("The countersigned receipt to write.")
@json_option
def countersign_(receipt: Path, signing_key: Path, output: Path, as_json: bool) -> None:
    """For a licensee: sign the receipt of a copy, so that nobody can say later that it went to somebody else."""
    from pathmark.front_door.licensing import countersign

    signed = countersign(receipt, signing_key, output)
    echo_done(signed.words(), signed.summary(), as_json)
