"""`pathmark report`: a result as a page."""

from __future__ import annotations

from pathlib import Path

import click

from pathmark.cli._keys import echo_json
from pathmark.cli._options import json_option, output_option
from pathmark.cli._types import Existing

EXAMPLES = """\b
Examples:
  pathmark report owner.key.marked.check.json -o marked.html
  pathmark verify ./suspect --key owner.key --json > verdict.json; pathmark report verdict.json -o verdict.html
  pathmark report ./case-17-evidence -o case-17.html --pdf
  pathmark report robustness/results.json -o robustness.html
"""


@click.command(epilog=EXAMPLES)
@click.argument("result", type=Existing("a result file or an evidence bundle"))
@output_option("The HTML file to write.")
@click.option("--pdf", is_flag=True, help="Also print the page, with Chromium or Chrome, beside it as a PDF.")
@json_option
def command(result: Path, output: Path, pdf: bool, as_json: bool) -> None:
    """Make a page that stands alone, for people who were not there.

    RESULT is an evidence bundle (a folder or a zip), the check that embed leaves beside the key, the --json of a
    verifying command, or the results.json of robustness or demo. The page fetches nothing, and only you may read the
    file: it shows what its source shows, and a bundle's opened watermark is no secret any more.
    """
    from pathmark.front_door.report import report

    made = report(result, output, pdf=pdf)
    if as_json:
        echo_json(made.summary())
    else:
        click.echo(made.words())
