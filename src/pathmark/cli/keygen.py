"""`pathmark keygen`: a new key for a model."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import click

from pathmark.cli._keys import echo_json, new_passphrase, render_key
from pathmark.cli._options import json_option, output_option, place_options, placed, texts_option, trust_option
from pathmark.cli._schemes import make_key as make_key_of_scheme
from pathmark.cli._schemes import scheme_option
from pathmark.cli._types import MODEL
from pathmark.errors import CapacityError

EXAMPLES = """\b
Examples:
  pathmark keygen bundled:tiny -o owner.key --owner "Example Lab"
  pathmark keygen ./Qwen1.5-MoE-A2.7B -o owner.key --layers 18-23 --id 42 --pool usage:0.5-4
  pathmark keygen MODEL -o two.key --watermarks 2 --layers 18-23 --layers 12-17
  pathmark keygen MODEL -o owner.key --redundancy 1 --triggers 4
  pathmark keygen MODEL -o owner.key --trigger triggers.txt --mark -
  pathmark keygen bundled:tiny --scheme kgw --set samples=30 -o kgw.key
"""


def _lines(context: click.Context, option: click.Parameter, file: IO[str] | None) -> tuple[str, ...]:
    return () if file is None else tuple(line for line in file.read().splitlines() if line.strip())


@click.command(epilog=EXAMPLES)
@click.argument("model", type=MODEL)
@output_option("The key file to write.")
@click.option("--owner", default="", help="The name that stands in the commitments.")
@click.option("--id", "ids", type=int, multiple=True, help="The id of a watermark; repeatable. Default: from the key.")
@click.option("--watermarks", type=click.IntRange(1), help="How many watermarks. Default: one, or one per --layers.")
@click.option("--layers", multiple=True, help="Layers such as 18-23 or 12,14,20; repeatable, once per watermark.")
@click.option(
    "--width", default=2, show_default=True, type=click.IntRange(1), help="How many target experts per layer."
)
@click.option(
    "--pool", default="auto", show_default=True,
    help="Which experts may be targets: all, usage:LOW-HIGH (times the mean use on clean text), or auto: "
    "usage:1-4, or usage:0.8-4 with fewer than 32 experts, where the weights fit in memory and enough paths are left, "
    "otherwise all.",
)  # fmt: skip
@texts_option("Clean text to measure the use of experts on")
@click.option(
    "--triggers", default=1, show_default=True, type=click.IntRange(1), help="How many triggers per watermark."
)
@click.option(
    "--trigger-tokens", type=int,
    help="How many tokens a drawn trigger has. Default: as few as keep 48 bits secret, at least 12. A quarter of them "
    "may be wrong, with half of them right the mark stays silent.",
)  # fmt: skip
@click.option(
    "--trigger", "trigger_texts", type=click.File(encoding="utf-8"), callback=_lines, metavar="FILE",
    help="Free texts as triggers, one per line; - reads standard input. Other users can see what stands in a command.",
)  # fmt: skip
@click.option(
    "--mark", "mark_texts", type=click.File(encoding="utf-8"), callback=_lines, metavar="FILE",
    help="Free texts as reply marks, one per line and per trigger; - reads standard input.",
)  # fmt: skip
@click.option(
    "--redundancy", default=0, show_default=True, type=click.IntRange(0), help="How many lost layers an id survives."
)
@click.option("--plain", is_flag=True, help="Store the key without encryption.")
@scheme_option
@click.option(
    "--set", "given", multiple=True, metavar="NAME=VALUE", help="With --scheme: one of its settings; repeatable."
)
@place_options
@trust_option
@json_option
def command(model: str, output: Path, plain: bool, as_json: bool, **options: Any) -> None:
    """Make a key for a model: its triggers, its target experts, and the ids it can carry.

    The key file is encrypted with a passphrase (PATHMARK_PASSPHRASE, or asked for), readable by you
    alone, and never overwritten. Back it up: without it nothing can be proved.
    """
    scheme, given = options.pop("scheme"), options.pop("given")
    if scheme is not None:
        make_key_of_scheme(model, scheme, output, plain=plain, given=given, as_json=as_json)
        return
    if given:
        raise click.UsageError("--set goes with --scheme; our own scheme has options by name")
    from pathmark.front_door.make_key import make_key
    from pathmark.release.planning import KeyPlan

    options["layers"] = tuple(parse_layers(text) for text in options["layers"])
    made = make_key(
        model, KeyPlan(placement=placed(options), **options), output=output, passphrase=new_passphrase, plain=plain
    )
    if as_json:
        echo_json(made.summary())
        return
    render_key(made.summary())
    for warning in made.warnings:
        click.echo(f"note: {warning}", err=True)
    click.echo(
        f"\nWritten to {output}. Next: pathmark embed {model} --key {output} -o marked. After it, back the key up and "
        "commit to it: docs/before-release.md."
    )


def parse_layers(text: str) -> tuple[int, ...]:
    """`18-23`, `12,14,20` or both mixed, as rising layer indices."""
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or len(part) > 11:
            raise CapacityError(f"cannot read layers {text!r}; expected such as 18-23 or 12,14,20")
        low, high = int(first), int(last or first)
        if high < low or high - low > 10_000:
            raise CapacityError(f"cannot read layers {text!r}; {part} does not rise")
        found.update(range(low, high + 1))
    return tuple(sorted(found))
