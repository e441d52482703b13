"""`pathmark barcode`: a key's path as a Code 128 barcode, and a barcode's path."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pathmark.cli._keys import open_key
from pathmark.cli._options import PATH, json_option, plain_option

EXAMPLES = """\b
Examples:
  pathmark barcode owner.key -o mark.svg
  pathmark barcode owner.key --watermark 1 -o second.png
  pathmark barcode --read photo.jpg
  pathmark barcode --read mark.svg --key owner.key
"""


@click.command(epilog=EXAMPLES)
@click.argument("key_file", metavar="[KEY]", required=False, type=PATH)
@plain_option
@click.option("-o", "--output", type=PATH, help="The file to draw into, .svg or .png.")
@click.option("--watermark", type=click.IntRange(0), help="Which watermark of the key is drawn. Default: the first.")
@click.option("--read", "image", type=PATH, help="Read the path from this picture.")
@click.option("--key", "compared", type=PATH, help="With --read: whose path is it?")
@json_option
def command(
    key_file: Path | None,
    output: Path | None,
    watermark: int | None,
    image: Path | None,
    compared: Path | None,
    as_json: bool,
) -> None:
    """Draw a key's path as a barcode, or read one from a picture.

    With --read and --key, exits 1 if the path belongs to none of the key's watermarks.
    """
    if image is not None and key_file is None and output is None and watermark is None:
        _read(image, compared, as_json)
    elif image is None and key_file is not None and output is not None and compared is None:
        _draw(key_file, watermark or 0, output, as_json)
    else:
        raise click.UsageError("give either KEY and -o FILE to draw, or --read IMAGE [--key KEY] to read")


def _draw(key_file: Path, number: int, output: Path, as_json: bool) -> None:
    from pathmark.errors import CapacityError
    from pathmark.reporting.barcode import write_barcode

    key = open_key(key_file)
    if number >= len(key.watermarks):
        raise CapacityError(f"expected a watermark below {len(key.watermarks)}, got {number}")
    watermark = key.watermarks[number]
    write_barcode(watermark.group_indices, output)
    result = {
        "watermark": number,
        "layers": list(watermark.layers),
        "path": list(watermark.group_indices),
        "file": str(output),
    }
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(f"{output}: watermark {number}, path {_words(watermark.group_indices)}")
    if len(key.watermarks) > 1:
        click.echo(f"The key has {len(key.watermarks)} watermarks; choose with --watermark.")


def _read(image: Path, key_file: Path | None, as_json: bool) -> None:
    from pathmark.reporting.barcode import read_barcode

    path = read_barcode(image)
    owners = None
    if key_file is not None:
        owners = [mark.index for mark in open_key(key_file).watermarks if mark.group_indices == path]
    if as_json:
        click.echo(json.dumps({"path": list(path), "watermarks": owners}))
    else:
        click.echo(f"path {_words(path)}")
        if owners is not None:
            names = ", ".join(map(str, owners))
            click.echo(f"watermark {names} of this key" if owners else "none of this key's watermarks")
    if owners == []:
        raise SystemExit(1)


def _words(path: tuple[int, ...]) -> str:
    return " ".join(map(str, path))
