"""`pathmark issue`: allot an id to a licensee."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pathmark.cli._keys import echo_json, passphrase
from pathmark.cli._options import PATH, json_option, key_option

EXAMPLES = """\b
Examples:
  pathmark issue --registry licensees.db --key master.key --licensee "Alpha Ltd"
  pathmark issue --registry licensees.db --key master.key --licensee "Alpha Ltd" -o alpha.key --receipt alpha.receipt
"""


@click.command(epilog=EXAMPLES)
@click.option("--registry", required=True, type=PATH, help="The database of who got which id.")
@key_option("The master key.")
@click.option("--licensee", required=True, help="The licensee's name; asking again for a name gives the same id.")
@click.option("--watermark", default=0, show_default=True, type=click.IntRange(0), help="Which watermark carries ids.")
@click.option("-o", "--output", type=PATH, help="Also write the key of this copy.")
@click.option("--receipt", type=PATH, help="Also write a receipt for the licensee to sign (registry countersign).")
@json_option
def command(registry: Path, key_file: Path, as_json: bool, **options: Any) -> None:
    """Allot an id to a licensee, as far from all ids before as the layers allow.

    The registry is made on first use. The copy's key has the same triggers and another path; embed it with
    `pathmark embed --key`.
    """
    from pathmark.front_door.licensing import issue

    issued = issue(key_file, registry, passphrase=passphrase(), **options)
    if as_json:
        echo_json(issued.summary())
    else:
        click.echo(issued.words())
