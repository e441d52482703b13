"""What the commands that handle keys share: passphrases, printing, and a key's public figures as text."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._options import EXPECTS_PLAIN

if TYPE_CHECKING:
    from pathmark.keys import OwnerKey


def passphrase(variable: str = "PATHMARK_PASSPHRASE", prompt: str = "Passphrase") -> Callable[[], str]:
    """Asks for an existing passphrase when called: the environment first, then the terminal."""
    from pathmark.keys.keyfile import no_passphrase

    if click.get_current_context().meta.get(EXPECTS_PLAIN):
        return no_passphrase

    def ask() -> str:
        from pathmark.keys.keyfile import passphrase_from_environment

        if os.environ.get(variable) or not sys.stdin.isatty():
            return passphrase_from_environment(variable)
        answer: str = click.prompt(prompt, hide_input=True, err=True)
        return answer

    return ask


def new_passphrase(variable: str = "PATHMARK_PASSPHRASE", prompt: str = "New passphrase") -> str:
    """A passphrase to encrypt with; typed twice in a terminal."""
    from pathmark.keys.keyfile import passphrase_from_environment

    if os.environ.get(variable) or not sys.stdin.isatty():
        return passphrase_from_environment(variable)
    answer: str = click.prompt(prompt, hide_input=True, confirmation_prompt=True, err=True)
    return answer


def open_key(path: Path) -> OwnerKey:
    """Load a key, asking for its passphrase if it has one."""
    from pathmark.keys import load_key

    return load_key(path, passphrase())


def echo_json(value: Any) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps(value, indent=2))


def echo_done(words: str, done: dict[str, Any], as_json: bool) -> None:
    """What a command did: one sentence, or the same as JSON."""
    if as_json:
        echo_json(done)
    else:
        click.echo(words)


def p_value(evidence_bits: float) -> str:
    """2^-bits as a decimal power, also below the range of floating point."""
    exponent = evidence_bits * 0.30102999566398120
    whole = int(exponent)
    mantissa = 10 ** (whole + 1 - exponent)
    return f"{mantissa:.1f}e-{whole + 1:02d}" if mantissa < 9.95 else f"1.0e-{whole:02d}"


def render_key(shown: dict[str, Any]) -> None:
    """The same figures as text."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=True)
    model = shown["model"]
    owner = escape(shown["owner"]) or "(no owner name)"
    console.print(f"[bold]{shown['fingerprint']}[/]  {owner}, made {shown['created']}, revision {shown['revision']}")
    console.print(f"for {escape(model['architecture'])}, {model['layers']} layers, vocabulary {model['vocabulary']:,}")
    for mark in shown["watermarks"]:
        table = Table(box=None, show_header=False)
        table.add_row("layers", ", ".join(map(str, mark["layers"])))
        table.add_row("width", _span(mark["widths"]))
        table.add_row("pool", f"{_span(mark['pool_sizes'])} experts, rule {escape(mark['pool_rule'])}")
        lost = f", survives {mark['redundancy']} lost layer(s)" if mark["redundancy"] else ""
        table.add_row("ids", f"{mark['ids']:,} ({mark['id_bits']:.1f} bits){lost}; this copy: {mark['id']}")
        first, second = mark["evidence_bits_after_erasures"]
        table.add_row(
            "smallest p",
            f"{p_value(mark['evidence_bits'])} ({mark['evidence_bits']:.1f} bits); one layer erased "
            f"{p_value(first)}, two {p_value(second)}",
        )
        table.add_row("trigger", _phrase(mark))
        table.add_row("mark", "free text, no bound" if mark["mark_bits"] is None else f"{mark['mark_bits']:.0f} bits")
        console.print(f"[bold]watermark {mark['watermark']}[/]")
        console.print(table)
    for name, size in shown["attachments"].items():
        console.print(f"attached: {escape(name)}, {size:,} bytes")


def _span(values: list[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)} to {max(values)}"


def _phrase(mark: dict[str, Any]) -> str:
    from pathmark.keys.tolerance import tolerance

    tokens, secret = mark["trigger_tokens"], mark["trigger_secret_bits"]
    strength = "free text, may be guessed"
    if secret is not None:
        limits = tolerance(tokens)
        strength = (
            f"{mark['trigger_bits']:.0f} bits; fires with up to {limits.accepted} wrong, silent with {limits.silent} "
            f"right or fewer, so {secret:.0f} bits remain secret"
        )
    return f"{mark['triggers']} of {tokens} tokens, {strength}"
