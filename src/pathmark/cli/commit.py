"""`pathmark commit`: publish what a key claims, bind it to a release, and check either."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._keys import echo_json, json_option, open_key
from pathmark.errors import KeyFileError

if TYPE_CHECKING:
    from pathmark.keys import Commitment
    from pathmark.keys.release import Progress

EXAMPLES = """\b
Examples:
  pathmark commit owner.key -o owner.commitment.json
  pathmark commit owner.key --release ./marked -o release.commitment.json
  pathmark commit --check release.commitment.json --key owner.key --release ./marked
  pathmark commit --check owner.commitment.json --claim claim.json
"""

_path = click.Path(path_type=Path)


@click.command(epilog=EXAMPLES)
@click.argument("key_file", metavar="[KEY]", required=False, type=_path)
@click.option("-o", "--output", type=_path, help="Commitment to write.")
@click.option("--release", type=_path, help="Folder whose files are bound, or checked.")
@click.option("--check", "checked", type=_path, help="Check this commitment instead of making one.")
@click.option("--key", "key_option", type=_path, help="With --check: the key it should belong to.")
@click.option("--claim", type=_path, help="With --check: a revealed watermark that it should contain.")
@json_option
def command(
    key_file: Path | None,
    output: Path | None,
    release: Path | None,
    checked: Path | None,
    key_option: Path | None,
    claim: Path | None,
    as_json: bool,
) -> None:
    """Make a signed commitment that is safe to publish, or check one.

    Without --release it commits to the key alone; with it, also to the sha256 of every released file.
    The date inside is only what you say: anchor the file outside (docs/disputes.md). A check exits with
    0 if everything holds, 1 if something differs, 2 if it could not be made.
    """
    if checked is not None and output is None:
        _check(checked, key_option or key_file, release, claim, as_json)
    elif checked is None and key_file is not None and output is not None and not (key_option or claim):
        _make(key_file, output, release, as_json)
    else:
        raise click.UsageError("give KEY and -o FILE to make a commitment, or --check FILE to check one")


def _make(key_file: Path, output: Path, release: Path | None, as_json: bool) -> None:
    from pathmark.keys import commit_key, commit_release

    key = open_key(key_file)
    if release is None:
        commitment = commit_key(key)
    else:
        with _progress(release) as progress:
            commitment = commit_release(key, release, progress=progress)
    try:
        with output.open("x", encoding="ascii") as file:
            file.write(json.dumps(commitment.document(), indent=1) + "\n")
    except FileExistsError:
        raise KeyFileError(f"{output} already exists; choose another name, commitments are kept") from None
    except OSError as error:
        raise KeyFileError(f"cannot write {output}: {error.strerror}") from None
    if as_json:
        echo_json({"file": str(output), **_summary(commitment)})
        return
    click.echo(f"{output}: {commitment.kind} commitment of {commitment.fingerprint}, revision {commitment.revision}")
    if commitment.files:
        click.echo(f"binds {len(commitment.files)} files, {sum(f.size for f in commitment.files):,} bytes")
    click.echo("Anchor it in time outside: a transparency log, a notary, a signed tag (docs/disputes.md).")


def _check(checked: Path, key_file: Path | None, release: Path | None, claim: Path | None, as_json: bool) -> None:
    from pathmark.keys import check_claim, check_commitment, load_commitment
    from pathmark.keys.commitment import load_public

    commitment = load_commitment(checked)
    key = None if key_file is None else open_key(key_file)
    with _progress(release) as progress:
        problems = check_commitment(commitment, key, release, progress=progress)
    if claim is not None:
        document = load_public(claim, "claim")
        try:
            check_claim(document, commitment)
        except KeyFileError as error:
            problems.append(str(error))
    if as_json:
        echo_json({"holds": not problems, "problems": problems, **_summary(commitment)})
    else:
        click.echo(f"{commitment.kind} commitment of {commitment.fingerprint}")
        click.echo(f"dated {commitment.created} by its owner")
        for problem in problems:
            click.echo(f"  {problem}")
        asked = {"key": key, "release": release, "claim": claim}
        told = [name for name, given in asked.items() if given is not None]
        click.echo("does not hold" if problems else f"holds: {', '.join(['signature', *told])}")
    if problems:
        raise SystemExit(1)


def _summary(commitment: Commitment) -> dict[str, Any]:
    return {
        "kind": commitment.kind,
        "owner": commitment.owner,
        "created": commitment.created,
        "fingerprint": commitment.fingerprint,
        "revision": commitment.revision,
        "root": commitment.root.hex(),
        "files": len(commitment.files),
    }


@contextlib.contextmanager
def _progress(folder: Path | None) -> Iterator[Progress | None]:
    """A bar over the bytes of the folder, in a terminal only."""
    if folder is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from pathmark.keys.release import release_files

    total = sum(path.stat().st_size for path in release_files(folder))
    console = Console(stderr=True)
    with Progress("sha256", BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("sha256", total=total)
        yield lambda name, size: bar.advance(task, size)
