"""`pathmark trace`: which licensee's copy is this?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._keys import echo_json, json_option, open_key

if TYPE_CHECKING:
    from pathmark.verification import TracedCopy

EXAMPLES = """\b
Examples:
  pathmark trace ./leaked --key master.key --registry licensees.db
  pathmark trace ./leaked --key master.key --registry licensees.db --suspects 3 --json
  pathmark trace ./pruned-leak --key master.key --registry licensees.db --graft ./our-unmarked-original
  pathmark trace --routes recorded.jsonl --key master.key --registry licensees.db
"""


@click.command(epilog=EXAMPLES)
@click.argument("model", required=False)
@click.option("--key", "key_file", required=True, type=click.Path(path_type=Path), help="The master key.")
@click.option("--registry", required=True, type=click.Path(path_type=Path), help="Who got which id.")
@click.option("--routes", type=click.Path(path_type=Path), help="Recorded routes instead of a model (docs/routes.md).")
@click.option("--base", help="Base model of a peft adapter, if its config does not name the right one.")
@click.option("--graft", help="Unmarked original: read the suspect's marked layers fed by its lower layers.")
@click.option("--n-probes", type=click.IntRange(1), default=100, show_default=True, help="Texts to probe with.")
@click.option("--significance", type=float, default=1e-6, show_default=True, help="Family-wise level.")
@click.option("--suspects", type=click.IntRange(1), default=1, show_default=True, help="Models examined in this case.")
@click.option(
    "--stream", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
    help="Read the weights layer by layer; auto: when they need more than half of the free memory.",
)  # fmt: skip
@click.option("--trust-remote-code", is_flag=True, help="Run the suspect's own Python code.")
@json_option
def command(model: str | None, key_file: Path, registry: Path, as_json: bool, **options: Any) -> None:
    """Name the licensee whose copy a suspect comes from.

    Every licensee's path is tested on one measurement. One is named only if its p-value holds against all
    licensees compared, and still holds if a rival's mark were in the model. Exit code 0: one or several named,
    1: nobody's mark, 2: marked, but rivals cannot be told apart, or failed.
    """
    from pathmark.cli._progress import Bar
    from pathmark.errors import VerificationError
    from pathmark.keys import Registry
    from pathmark.stats import Family
    from pathmark.verification import Criteria, ExamineConfig, examine, examine_routes, trace_copy

    if (model is None) == (options["routes"] is None):
        raise VerificationError("expected a model or --routes FILE, one of the two")
    if options["graft"] is not None and model is None:
        raise VerificationError("--graft needs the suspect's weights; give a model folder")
    key = open_key(key_file)
    book = Registry(registry)
    book.check_key(key)
    with Bar(quiet=as_json) as bar:
        if model is None:
            examined = examine_routes(options["routes"], key)
        else:
            config = ExamineConfig(
                n_probes=options["n_probes"],
                decoys=0,
                as_it_is=options["graft"] is None,
                stream=options["stream"],
                trust_remote_code=options["trust_remote_code"],
            )
            examined = examine(
                model, key, config, base=options["base"], original=options["graft"], progress=bar
            )  # fmt: skip
    criteria = Criteria(significance=options["significance"], family=Family(suspects=options["suspects"]))
    traced = trace_copy(key, examined.evidence, book.entries(), criteria=criteria)
    if as_json:
        echo_json({"suspect": model or str(options["routes"]), **traced.summary()})
    else:
        render(traced)
    sys.exit({"licensee": 0, "several": 0, "none": 1, "ambiguous": 2}[traced.result.decision])


def render(traced: TracedCopy) -> None:
    """The strongest licensees, then the decision in words."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=True)
    table = Table(box=None, header_style="bold")
    for heading in ("licensee", "id", "p, uncharged"):
        table.add_column(heading, justify="left" if heading == "licensee" else "right")
    for name, p in traced.result.ranking:
        table.add_row(escape(name), str(traced.ids[name]), str(p))
    console.print(table)
    console.print(escape(traced.words()), highlight=False)
