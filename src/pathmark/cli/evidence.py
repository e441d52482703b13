"""`pathmark evidence`: check a bundle that --evidence wrote, measure it again, or note what was received."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pathmark.cli._keys import echo_json
from pathmark.cli._options import PATH, Group, base_option, json_option

bundle_argument = click.argument("bundle", type=PATH)
commitment_option = click.option("--commitment", type=PATH, help="The commitment as its owner published it.")


@click.group(cls=Group)
def command() -> None:
    """Check evidence that somebody hands you, without the key, and measure it again on your own copy.

    `verify`, `verify-api`, `verify-routes` and `trace` write a bundle with --evidence.
    """


@command.command(
    short_help="Say whether a bundle holds.",
    epilog="\b\nExamples:\n  pathmark evidence check case-17 --commitment owner.commitment.json\n"
    "  pathmark evidence check case-17.zip --commitment owner.commitment.json --timestamp-roots authority.pem",
)
@bundle_argument
@commitment_option
@click.option(
    "--timestamp-roots", type=PATH,
    help="Root certificates (PEM) of the time-stamping authorities that you trust with the commitment's date.",
)  # fmt: skip
@click.option(
    "--block-headers", type=PATH,
    help="Headers of the Bitcoin blocks (160 hex digits per line) that OpenTimestamps proofs lead to.",
)  # fmt: skip
@json_option
def check(bundle: Path, as_json: bool, **trusted: Any) -> None:
    """Check every byte of a bundle, the opened watermarks, and that the figures follow from what was recorded.

    Needs no key, no model and no network. Exit code 0: it holds, 1: it does not, 2: it could not be read.
    """
    from pathmark.front_door.evidence import check_evidence

    checked = check_evidence(bundle, **trusted)
    if as_json:
        echo_json(checked.summary())
    else:
        click.echo(checked.words())
    raise SystemExit(0 if checked.holds else 1)


@command.command(
    short_help="Measure again what a bundle tells.",
    epilog="\b\nExamples:\n  pathmark evidence replay case-17 --suspect ./our-copy-of-the-suspect\n"
    "  pathmark evidence replay case-17.zip --suspect ./adapter --base ./base-model --json",
)
@bundle_argument
@click.option("--suspect", required=True, help="Your own copy of the suspect: a folder or a hub id.")
@commitment_option
@base_option
@json_option
def replay(bundle: Path, suspect: str, commitment: Path | None, base: str | None, as_json: bool) -> None:
    """Run the opened watermarks of a bundle through your own copy of the suspect, with the same texts and controls.

    Needs no key. Exit code 0: the same figures came out, 1: others, 2: it could not be done.
    """
    from pathmark.cli._progress import Bar
    from pathmark.front_door.evidence import replay_evidence

    with Bar(quiet=as_json) as bar:
        again = replay_evidence(bundle, suspect, commitment=commitment, base=base, progress=bar)
    if as_json:
        echo_json(again.summary())
    else:
        click.echo(again.words())
    raise SystemExit(0 if again.same else 1)


@command.command(
    short_help="Print the digest of a model, to be noted on receipt.",
    epilog="\b\nExamples:\n  pathmark evidence root ./suspect",
)
@click.argument("suspect")
@json_option
def root(suspect: str, as_json: bool) -> None:
    """Print one digest over all files of a model, as OpenSSF model signing computes it.

    Note it when a suspect reaches you, in the file for --custody: it shows that what was examined is what came.
    """
    from pathmark.front_door.evidence import suspect_root

    found = suspect_root(suspect)
    if as_json:
        echo_json({"suspect": suspect, "root": found})
    else:
        click.echo(found)
