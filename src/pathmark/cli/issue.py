"""`pathmark issue`: allot an id to a licensee."""

from __future__ import annotations

from pathlib import Path

import click

from pathmark.cli._keys import echo_json, json_option, passphrase

EXAMPLES = """\b
Examples:
  pathmark issue --registry licensees.db --key master.key --licensee "Alpha Ltd"
  pathmark issue --registry licensees.db --key master.key --licensee "Alpha Ltd" -o alpha.key
"""


@click.command(epilog=EXAMPLES)
@click.option("--registry", required=True, type=click.Path(path_type=Path), help="Made on first use.")
@click.option("--key", "key_file", required=True, type=click.Path(path_type=Path), help="The master key.")
@click.option("--licensee", required=True, help="Name; asking again for a name gives the same id.")
@click.option("--watermark", default=0, show_default=True, type=click.IntRange(0), help="Which one carries ids.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the key of this copy.")
@json_option
def command(registry: Path, key_file: Path, licensee: str, watermark: int, output: Path | None, as_json: bool) -> None:
    """Allot an id to a licensee, as far from all ids before as the layers allow.

    The copy's key has the same triggers and another path; embed it with `pathmark embed --key`.
    """
    from pathmark.keys import Registry, load_key, save_key
    from pathmark.keys.keyfile import is_plain
    from pathmark.keys.spread import guaranteed_distance

    plain = is_plain(key_file)
    phrase = None if plain else passphrase()()
    key = load_key(key_file, phrase)
    book = Registry(registry)
    entry, new = book.issue(key, licensee, watermark=watermark)
    if output is not None:
        save_key(key.with_id(entry.id, watermark), output, phrase, plain=plain)
    code = key.watermarks[watermark].code
    result = {
        "licensee": entry.licensee,
        "id": entry.id,
        "new": new,
        "ordinal": entry.ordinal,
        "issued": entry.issued,
        "layers": len(code.radices),
        "distance": entry.distance,
        "distance_all": book.distance(),
        "distance_guaranteed": guaranteed_distance(code, entry.ordinal),
        "ids": code.capacity,
        "file": None if output is None else str(output),
    }
    if as_json:
        echo_json(result)
        return
    click.echo(f"{entry.licensee}: id {entry.id}{'' if new else f' (issued {entry.issued})'}")
    click.echo(
        f"differs in at least {entry.distance} of {len(code.radices)} layers from every id before; "
        f"nearest two of all: {result['distance_all']}"
    )
    if output is not None:
        click.echo(f"key of this copy: {output}")
