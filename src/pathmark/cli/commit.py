"""`pathmark commit`: publish what a key claims, bind it to a release, and check either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pathmark.cli._keys import echo_json, passphrase
from pathmark.cli._options import PATH, json_option, plain_option

EXAMPLES = """\b
Examples:
  pathmark commit owner.key -o owner.commitment.json
  pathmark commit owner.key --release ./marked -o release.commitment.json
  pathmark commit owner.key -o owner.commitment.json --timestamp-request owner.tsq
  pathmark commit --stamp owner.commitment.json --timestamp owner.tsr
  pathmark commit --check owner.commitment.json --timestamp-roots authority.pem
  pathmark commit --check owner.commitment.json --block-headers headers.txt
  pathmark commit --check release.commitment.json --key owner.key --release ./marked
  pathmark commit --check owner.commitment.json --claim claim.json
"""


@click.command(epilog=EXAMPLES)
@click.argument("key_file", metavar="[KEY]", required=False, type=PATH)
@click.option("-o", "--output", type=PATH, help="The commitment to write.")
@click.option("--release", type=PATH, help="The folder whose files are bound, or checked.")
@click.option("--check", "checked", type=PATH, help="Check this commitment instead of making one.")
@click.option("--key", "key_option", type=PATH, help="With --check: the key it should belong to.")
@plain_option
@click.option("--claim", type=PATH, help="With --check: a revealed watermark that it should contain.")
@click.option(
    "--timestamp-request", type=PATH, help="Also write this request for a time-stamping authority (RFC 3161)."
)
@click.option("--timestamp-statement", type=PATH, help="Also write this file, for `ots stamp` (OpenTimestamps).")
@click.option("--stamp", "stamped", type=PATH, help="Attach a date that somebody vouches for, --timestamp, to this.")
@click.option("--timestamp", type=PATH, help="With --stamp: the authority's answer (.tsr), or an upgraded .ots proof.")
@click.option(
    "--timestamp-roots", type=PATH, help="With --check: root certificates (PEM) of the authorities that you trust."
)
@click.option("--block-headers", type=PATH, help="With --check: headers of Bitcoin blocks, 160 hex digits per line.")
@json_option
def command(key_file: Path | None, as_json: bool, **options: Any) -> None:
    """Make a signed commitment that is safe to publish, have it stamped, or check one.

    Without --release it commits to the key alone; with it, also to the sha256 of every released file. The date inside
    is only what you say: send the --timestamp-request to a time-stamping authority and attach its answer with --stamp.
    A check exits with 0 if everything holds, 1 if something differs, 2 if it could not be made.
    """
    from pathmark.cli._progress import Bar
    from pathmark.front_door.commit import CheckConfig, check, commit, stamp_commitment

    doing = _asked_for(key_file, options)
    release, made = options["release"], None
    with Bar(quiet=as_json or release is None) as bar:
        if doing == "make" and key_file is not None:
            made = commit(
                key_file, options["output"], release=release, request=options["timestamp_request"],
                statement=options["timestamp_statement"], passphrase=passphrase(), progress=bar,
            )  # fmt: skip
        elif doing == "stamp":
            made = stamp_commitment(options["stamped"], options["timestamp"])
        else:
            compared = CheckConfig(
                key=options["key_option"] or key_file, release=release, claim=options["claim"],
                timestamp_roots=options["timestamp_roots"], block_headers=options["block_headers"],
            )  # fmt: skip
            found = check(options["checked"], compared, passphrase=passphrase(), progress=bar)
    shown = made or found
    if as_json:
        echo_json(shown.summary())
    else:
        click.echo(shown.words())
    if made is None and not found.holds:
        raise SystemExit(1)


MAKE, STAMP, CHECK = ({"output", "release", "timestamp_request", "timestamp_statement"}, {"stamped", "timestamp"},
                      {"checked", "release", "key_option", "claim", "timestamp_roots", "block_headers"})  # fmt: skip
"""Options of the three things that this command does."""


def _asked_for(key_file: Path | None, options: dict[str, Any]) -> str:
    """`make`, `stamp` or `check`; a mixture is refused."""
    given = {name for name, value in options.items() if value is not None}
    if "stamped" in given and given == STAMP and key_file is None:
        return "stamp"
    if "checked" in given and given <= CHECK:
        return "check"
    if key_file is not None and "output" in given and given <= MAKE:
        return "make"
    raise click.UsageError(
        "give KEY and -o FILE to make a commitment, --stamp FILE and --timestamp ANSWER to attach a timestamp, or "
        "--check FILE to check one"
    )
