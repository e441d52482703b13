"""`pathmark report`: a result as a page."""

from __future__ import annotations

from pathlib import Path

import click

from pathmark.cli._keys import echo_json
from pathmark.cli._options import PATH, json_option, output_option

EXAMPLES = """\b
Examples:
  pathmark report owner.key.marked.check.json -o marked.html
  pathmark verify ./suspect --key owner.key --json > verdict.json; pathmark report verdict.json -o verdict.html
  pathmark report robustness/results.json -o robustness.html
"""


@click.command(epilog=EXAMPLES)
@click.argument("result", type=PATH)
@output_option("The HTML file to write.")
@json_option
def command(result: Path, output: Path, as_json: bool) -> None:
    """Make a page that stands alone from what a command left as JSON.

    RESULT is the check that embed leaves beside the key, the --json of a verifying command, or the results.json of
    robustness or demo. The page holds no script and fetches nothing.
    """
    from pathmark.front_door.report import report

    made = report(result, output)
    if as_json:
        echo_json(made.summary())
    else:
        click.echo(made.words())
