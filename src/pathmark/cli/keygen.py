"""`pathmark keygen`: a new key for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pathmark.cli._keys import describe_key, echo_json, json_option, new_passphrase, render_key
from pathmark.errors import CapacityError, KeyFileError

EXAMPLES = """\b
Examples:
  pathmark keygen --model bundled:tiny -o owner.key --owner "Example Lab"
  pathmark keygen --model ./Qwen1.5-MoE-A2.7B -o owner.key --layers 18-23 --id 42 --pool usage:0.5-4
  pathmark keygen --model MODEL -o two.key --watermarks 2 --layers 18-23 --layers 12-17
  pathmark keygen --model MODEL -o owner.key --redundancy 1 --triggers 4
"""


@click.command(epilog=EXAMPLES)
@click.option("--model", required=True, help="Folder, hub id or bundled:tiny.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Key file to write.")
@click.option("--owner", default="", help="Name that stands in the commitments.")
@click.option("--id", "ids", type=int, multiple=True, help="Id of a watermark; repeatable. Default: from the key.")
@click.option("--watermarks", type=click.IntRange(1), help="How many. Default: one, or one per --layers.")
@click.option("--layers", multiple=True, help="Such as 18-23 or 12,14,20; repeatable, one per watermark.")
@click.option("--width", default=2, show_default=True, type=click.IntRange(1), help="Target experts per layer.")
@click.option(
    "--pool",
    default="auto",
    show_default=True,
    help="Which experts may be targets: all, usage:LOW-HIGH (times the mean use on clean text), or auto: "
    "usage:1-4, or usage:0.8-4 with fewer than 32 experts, where the weights fit in memory, otherwise all.",
)
@click.option("--pool-texts", type=click.Path(path_type=Path), help="Clean text, one per line. Default: bundled.")
@click.option("--triggers", default=1, show_default=True, type=click.IntRange(1), help="Triggers per watermark.")
@click.option(
    "--trigger-tokens", type=int,
    help="Tokens in a drawn trigger. Default: as few as keep 48 bits secret, at least 12. A quarter of them may be "
    "wrong, with half of them right the mark stays silent.",
)  # fmt: skip
@click.option("--trigger", "trigger_texts", multiple=True, help="Free text instead; repeatable, one per trigger.")
@click.option("--mark", "mark_texts", multiple=True, help="Free text as reply; repeatable, one per trigger.")
@click.option("--redundancy", default=0, show_default=True, type=click.IntRange(0), help="Layers an id survives.")
@click.option("--plain", is_flag=True, help="Store the key without encryption.")
@click.option("--trust-remote-code", is_flag=True, help="Run the model folder's own Python code.")
@json_option
def command(model: str, output: Path, plain: bool, as_json: bool, **options: Any) -> None:
    """Make a key for a model: its triggers, its target experts, and the ids it can carry.

    The key file is encrypted with a passphrase (PATHMARK_PASSPHRASE, or asked for), readable by you
    alone, and never overwritten. Back it up: without it nothing can be proved.
    """
    import os

    from pathmark.keys import save_key
    from pathmark.release.planning import KeyPlan, plan_key

    if os.path.lexists(output):
        raise KeyFileError(f"{output} already exists; choose another name, key material is never overwritten")
    phrase = None if plain else new_passphrase()
    plan = KeyPlan(
        owner=options["owner"],
        layers=tuple(parse_layers(text) for text in options["layers"]),
        pool_texts=_pool_texts(options["pool_texts"]),
        **{
            name: options[name]
            for name in (
                "watermarks", "ids", "width", "pool", "triggers", "trigger_tokens", "trigger_texts", "mark_texts",
                "redundancy", "trust_remote_code",
            )
        },
    )  # fmt: skip
    key, warnings = plan_key(model, plan)
    save_key(key, output, phrase, plain=plain)
    if plain:
        warnings.append("the key is stored without encryption: whoever reads the file has the key")
    shown = {"file": str(output), **describe_key(key), "warnings": warnings}
    if as_json:
        echo_json(shown)
        return
    render_key(shown)
    for warning in shown["warnings"]:
        click.echo(f"note: {warning}", err=True)
    click.echo(f"\nWritten to {output}. Next: pathmark key backup {output}, then pathmark commit {output}.")


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


def _pool_texts(path: Path | None) -> tuple[str, ...] | None:
    if path is None:
        return None
    try:
        return tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise CapacityError(f"cannot read {path} as text: {error}") from None
