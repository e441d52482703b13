"""`pathmark commit`: publish what a key claims, bind it to a release, and check either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pathmark.cli._keys import echo_json, passphrase
from pathmark.cli._options import PATH, json_option

EXAMPLES = """\b
Examples:
  pathmark commit owner.key -o owner.commitment.json
  pathmark commit owner.key --release ./marked -o release.commitment.json
  pathmark commit --check release.commitment.json --key owner.key --release ./marked
  pathmark commit --check owner.commitment.json --claim claim.json
"""


@click.command(epilog=EXAMPLES)
@click.argument("key_file", metavar="[KEY]", required=False, type=PATH)
@click.option("-o", "--output", type=PATH, help="The commitment to write.")
@click.option("--release", type=PATH, help="The folder whose files are bound, or checked.")
@click.option("--check", "checked", type=PATH, help="Check this commitment instead of making one.")
@click.option("--key", "key_option", type=PATH, help="With --check: the key it should belong to.")
@click.option("--claim", type=PATH, help="With --check: a revealed watermark that it should contain.")
@json_option
def command(key_file: Path | None, as_json: bool, **options: Any) -> None:
    """Make a signed commitment that is safe to publish, or check one.

    Without --release it commits to the key alone; with it, also to the sha256 of every released file.
    The date inside is only what you say: anchor the file outside (docs/disputes.md). A check exits with
    0 if everything holds, 1 if something differs, 2 if it could not be made.
    """
    from pathmark.cli._progress import Bar
    from pathmark.front_door.commit import CheckConfig, check, commit

    output, checked, release = options["output"], options["checked"], options["release"]
    making = checked is None and key_file is not None and output is not None
    if making == (checked is not None and output is None) or (making and (options["key_option"] or options["claim"])):
        raise click.UsageError("give KEY and -o FILE to make a commitment, or --check FILE to check one")
    with Bar(quiet=as_json or release is None) as bar:
        if making and key_file is not None:
            made: Any = commit(key_file, output, release=release, passphrase=passphrase(), progress=bar)
        else:
            compared = CheckConfig(key=options["key_option"] or key_file, release=release, claim=options["claim"])
            made = check(checked, compared, passphrase=passphrase(), progress=bar)
    if as_json:
        echo_json(made.summary())
    else:
        click.echo(made.words())
    if not making and not made.holds:
        raise SystemExit(1)
