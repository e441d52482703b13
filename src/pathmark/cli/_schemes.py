"""What the commands share that take `--scheme`: marks of other people, to compare ours with."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pathmark.cli._keys import echo_done, echo_json, new_passphrase, passphrase
from pathmark.cli._options import judged_by

if TYPE_CHECKING:
    from pathmark.front_door.robustness import RobustnessPlan

ALWAYS = ("scheme", "key_file", "as_json", "quiet", "plain", "trust_remote_code", "output", "model", "suspect")
"""Options that mean the same with every scheme."""

scheme_option = click.option(
    "--scheme", metavar="NAME", help="Another scheme than ours: kgw, learnmark, ifmark or eaaw (docs/baselines.md)."
)


def refuse_foreign(scheme: str, *own: str) -> None:
    """An option that was given and has no meaning with another scheme is refused."""
    context = click.get_current_context()
    for option in context.command.params:
        given = option.name and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
        if given and option.name not in (*ALWAYS, *own):
            raise click.UsageError(f"{option.opts[-1]} has no meaning with --scheme {scheme}; leave it out")


def parse_settings(given: Sequence[str]) -> dict[str, Any]:
    """`lr=3e-4` and `selfhash=true` as numbers, truth values and texts by their names."""
    settings: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.UsageError(f"--set expects NAME=VALUE, got {text!r}")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def make_key(model: str, scheme: str, output: Path, *, plain: bool, given: Sequence[str], as_json: bool) -> None:
    """`pathmark keygen --scheme`."""
    refuse_foreign(scheme, "given")
    from pathmark.front_door.schemes import make_scheme_key

    made = make_scheme_key(
        model, scheme, parse_settings(given), output=output, passphrase=new_passphrase, plain=plain
    )  # fmt: skip
    echo_done(made.words(), made.summary(), as_json)


def embed(model: str, key_file: Path, output: Path, options: dict[str, Any], as_json: bool) -> None:
    """`pathmark embed --scheme`; ends the process with 0 where the scheme finds its mark, else with 1."""
    refuse_foreign(options["scheme"], "texts")
    from pathmark.cli._progress import training_bar
    from pathmark.front_door.schemes import SchemePlan, embed_scheme, open_scheme_key

    key = open_scheme_key(key_file, passphrase())
    refuse_other(options["scheme"], key.scheme)
    plan = SchemePlan(texts=options["texts"], trust_remote_code=options["trust_remote_code"])
    with training_bar(quiet=as_json) as bar:
        done = embed_scheme(model, key, output, plan, progress=bar)
    echo_done(done.words(), done.summary(), as_json)
    sys.exit(0 if done.fit else 1)


def verify(suspect: str, key_file: Path | None, options: dict[str, Any], as_json: bool) -> None:
    """`pathmark verify --scheme`; ends the process with the verdict's code."""
    refuse_foreign(options["scheme"], "texts", "no_sandbox", "significance", "strict", "suspects", "keys")
    if key_file is None:
        raise click.UsageError("--scheme needs the --key that keygen made for it")
    from pathmark.cli._progress import Bar
    from pathmark.cli._verdict import render_verdict
    from pathmark.front_door.schemes import SchemePlan, open_scheme_key, verify_scheme

    key = open_scheme_key(key_file, passphrase())
    refuse_other(options["scheme"], key.scheme)
    plan = SchemePlan(
        texts=options["texts"], criteria=judged_by(options)["criteria"], sandbox=not options["no_sandbox"],
        trust_remote_code=options["trust_remote_code"],
    )  # fmt: skip
    with Bar(quiet=as_json) as bar:
        found = verify_scheme(suspect, key, plan, progress=bar)
    if as_json:
        echo_json(found.summary())
    else:
        render_verdict(found.suspect, found.access, found.verdict)
    sys.exit(found.exit_code)


def robustness(scheme: str, model: str, key_file: Path, output: Path, plan: RobustnessPlan, as_json: bool) -> None:
    """`pathmark robustness --scheme`."""
    from pathmark.cli._progress import training_bar
    from pathmark.front_door.scheme_robustness import measure_scheme
    from pathmark.front_door.schemes import open_scheme_key
    from pathmark.reporting.scheme_robustness import scheme_table

    key = open_scheme_key(key_file, passphrase())
    refuse_other(scheme, key.scheme)
    with training_bar(quiet=as_json) as bar:
        measured = measure_scheme(model, key, output, plan, progress=bar)
    echo_done(f"{scheme_table(measured.results)}\n{measured.words()}", measured.summary(), as_json)


def refuse_other(named: str, kept: str) -> None:
    """The key of another scheme than the one that was named."""
    from pathmark.baselines import find_scheme
    from pathmark.errors import KeyFileError

    find_scheme(named)
    if named != kept:
        raise KeyFileError(f"the key is of the scheme {kept}, expected {named}; give --scheme {kept}, or another key")
