"""`pathmark key`: look at a key, reveal one watermark, back it up, restore it, change its passphrase."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._keys import echo_done, echo_json, new_passphrase, open_key, passphrase, render_key
from pathmark.cli._options import Group, json_option, key_argument, output_option
from pathmark.cli._types import Existing
from pathmark.errors import KeyFileError

if TYPE_CHECKING:
    from pathmark.keys import OwnerKey


@click.group(cls=Group)
def command() -> None:
    """Look at a key, reveal one watermark, back it up, restore it, change its passphrase."""


@command.command(
    short_help="Show what a key can do.",
    epilog="\b\nExamples:\n  pathmark key show owner.key\n  pathmark key show owner.key --reveal --json",
)
@key_argument
@click.option("--reveal", is_flag=True, help="Also show triggers, marks and target experts.")
@json_option
def show(key_file: Path, reveal: bool, as_json: bool) -> None:
    """Show what a key can do; its triggers and paths only with --reveal, its secret never."""
    from pathmark.front_door.keys import describe_key

    key = open_key(key_file)
    shown = describe_key(key)
    if reveal:
        for mark, row in zip(key.watermarks, shown["watermarks"], strict=True):
            row["path"] = {str(layer): list(targets) for layer, targets in mark.path.items()}
            row["group_indices"] = list(mark.group_indices)
            row["phrases"] = [{"trigger": t.text, "tokens": list(t.tokens), "mark": t.mark.text} for t in mark.triggers]
    if as_json:
        echo_json(shown)
        return
    render_key(shown)
    for row in shown["watermarks"] if reveal else ():
        _render_revealed(row)


@command.command(
    short_help="Write a claim that opens one watermark.",
    epilog="\b\nExamples:\n  pathmark key reveal owner.key --watermark 0 -o claim.json\n"
    "  pathmark commit --check owner.commitment.json --claim claim.json\n"
    "  pathmark verify ./suspect --claim claim.json --commitment owner.commitment.json",
)
@key_argument
@click.option("--watermark", default=0, show_default=True, type=click.IntRange(0), help="Which watermark is opened.")
@click.option("--revision", type=click.IntRange(0), help="The revision of the commitment. Default: the present one.")
@click.option("--bare", is_flag=True, help="Leave out probe texts, sketches and profiles; experts then go by number.")
@output_option("The claim to write.")
@json_option
def reveal(key_file: Path, output: Path, watermark: int, revision: int | None, bare: bool, as_json: bool) -> None:
    """Write a claim that opens one watermark of the key's commitment, for an arbiter, and nothing of the others.

    Whoever reads the claim knows that watermark's triggers and targets. The profiles that come along tell which layers
    the key marks in all.
    """
    from pathmark.keys import reveal_watermark
    from pathmark.keys.safefile import write_private

    claim = reveal_watermark(open_key(key_file), watermark, revision=revision, bare=bare)
    write_private(output, json.dumps(claim, indent=1).encode() + b"\n")
    words = f"{output}: watermark {watermark}, readable by you alone until you hand it out"
    echo_done(words, {"output": str(output), "watermark": watermark}, as_json)


@command.command(
    short_help="Write a second key file, or shares.",
    epilog="\b\nExamples:\n  pathmark key backup owner.key -o backup.key\n"
    "  pathmark key backup owner.key -o backup.key --shares 3/5 > shares.txt",
)
@key_argument
@output_option("The backup to write.")
@click.option("--shares", help="Print N shares, any M of which open the backup, given as M/N.")
@json_option
def backup(key_file: Path, output: Path, shares: str | None, as_json: bool) -> None:
    """Write a second key file, under a second passphrase or for printed shares.

    The passphrase is taken from PATHMARK_BACKUP_PASSPHRASE or asked for. With --shares the backup is
    encrypted with a random key that exists only as shares: print them, give them to different people.
    """
    from pathmark.keys import save_key
    from pathmark.keys.shares import split_secret

    if shares is None:
        key = open_key(key_file)
        save_key(key, output, new_passphrase("PATHMARK_BACKUP_PASSPHRASE", "Passphrase of the backup"))
        texts = []
    else:
        threshold, count = _fraction(shares)
        secret = secrets.token_bytes(32)
        texts = [share.text() for share in split_secret(secret, threshold, count)]
        key = open_key(key_file)
        save_key(key, output, secret.hex())
    if as_json:
        echo_json({"file": str(output), "fingerprint": key.fingerprint, "shares": texts})
        return
    for number, text in enumerate(texts, 1):
        click.echo(f"share {number} of {len(texts)} for {output.name}, any {threshold} open it:\n{text}\n")
    click.echo(f"Backup of {key.fingerprint} written to {output}.", err=bool(texts))


@command.command(
    short_help="Open a backup.",
    epilog="\b\nExamples:\n  pathmark key restore backup.key -o owner.key\n"
    "  pathmark key restore backup.key -o owner.key --shares-from shares.txt",
)
@click.argument("backup_file", metavar="BACKUP", type=Existing("a backup"))
@output_option("The key file to write.")
@click.option("--shares-from", type=click.File("r"), help="A file with one share per line, or - for stdin.")
@json_option
def restore(backup_file: Path, output: Path, shares_from: Any, as_json: bool) -> None:
    """Open a backup with its passphrase or with shares, and write a key file under a new passphrase."""
    from pathmark.keys import load_key, save_key

    if shares_from is None:
        asked = passphrase("PATHMARK_BACKUP_PASSPHRASE", "Passphrase of the backup (or give --shares-from)")
        key = load_key(backup_file, asked)
    else:
        key = _open_with_shares(backup_file, shares_from.read())
    save_key(key, output, new_passphrase())
    done = {"output": str(output), "fingerprint": key.fingerprint}
    echo_done(f"Key {key.fingerprint} restored to {output}.", done, as_json)


@command.command(short_help="Change the passphrase.", epilog="\b\nExamples:\n  pathmark key rotate owner.key")
@key_argument
@json_option
def rotate(key_file: Path, as_json: bool) -> None:
    """Change the passphrase of a key file (PATHMARK_PASSPHRASE to PATHMARK_NEW_PASSPHRASE, or asked for).

    The key stays the same: copies under the old passphrase still open with it.
    """
    from pathmark.keys import rotate_passphrase

    key = rotate_passphrase(key_file, passphrase(), lambda: new_passphrase("PATHMARK_NEW_PASSPHRASE"))
    done = {"file": str(key_file), "fingerprint": key.fingerprint}
    echo_done(f"{key_file} ({key.fingerprint}) now opens with the new passphrase only.", done, as_json)


def _open_with_shares(backup_file: Path, text: str) -> OwnerKey:
    from pathmark.keys import load_key
    from pathmark.keys.shares import Share, join_shares

    # Printed shares come with a line of explanation each; only lines of pure share letters count.
    letters = set("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567-")
    lines = [line.strip() for line in text.splitlines()]
    shares = [Share.parse(line) for line in lines if len(line) > 20 and set(line.upper()) <= letters]
    return load_key(backup_file, join_shares(shares).hex())


def _fraction(text: str) -> tuple[int, int]:
    first, slash, second = text.partition("/")
    if not (slash and first.isdigit() and second.isdigit()):
        raise KeyFileError(f"expected --shares M/N such as 3/5, got {text!r}")
    return int(first), int(second)


def _render_revealed(row: dict[str, Any]) -> None:
    click.echo(f"watermark {row['watermark']}, revealed:")
    for phrase in row["phrases"]:
        click.echo(f"  trigger {phrase['trigger']!r}\n  mark    {phrase['mark']!r}")
    for layer, targets in row["path"].items():
        click.echo(f"  layer {layer}: experts {', '.join(map(str, targets))}")
    sys.stdout.flush()
