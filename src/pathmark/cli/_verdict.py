"""How the three verifying commands show a verdict."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pathmark.cli._keys import echo_json
from pathmark.cli._options import speaks, write_evidence

if TYPE_CHECKING:
    from rich.console import Console

    from pathmark.front_door.verify import Verification
    from pathmark.verdicts.wording import Wording
    from pathmark.verification import PathVerdict, Verdict


def finish(found: Verification, options: dict[str, Any], as_json: bool) -> None:
    """Show the verdict, keep the log, exit with the verdict's code; of several processes the first one does."""
    if not speaks():
        sys.exit(0)
    if as_json:
        echo_json(found.summary())
    else:
        render_verdict(found.suspect, found.access, found.verdict)
    if options.get("log_folder") is not None:  # after the verdict was shown: it must not be lost with a full disk
        found.write_log(options["log_folder"], obtained=options["obtained"])
    write_evidence(found, options)
    sys.exit(found.exit_code)


def render_verdict(suspect: str, access: str, verdict: Verdict) -> None:
    """The verdict in words with what would weaken it; then the figures, with a table where routing was read."""
    from rich.console import Console
    from rich.markup import escape

    from pathmark.verification import PathVerdict, ReplyVerdict

    console = Console(soft_wrap=True)
    endpoint = f" ({escape(verdict.endpoint)})" if isinstance(verdict, ReplyVerdict) else ""
    console.print(f"[bold]{escape(suspect)}[/], from {access}{endpoint}")
    render_words(verdict.wording(), console)
    if isinstance(verdict, PathVerdict):
        _render_layers(verdict, console)
    console.print(GLOSSARY_AT)


GLOSSARY_AT = "Terms are explained in docs/glossary.md."


def render_words(said: Wording, console: Console) -> None:
    """The first screen, and headings over what follows."""
    from rich.markup import escape

    from pathmark.verdicts.wording import FIGURES, FOUND, WEAKENERS

    console.print(f"[bold {'green' if said.headline == FOUND else 'yellow'}]{said.headline}[/]")
    for line in said.sentences:
        console.print(escape(line), highlight=False)
    for heading, lines in ((WEAKENERS, said.weakeners), (FIGURES, said.figures)):
        console.print(f"\n[bold]{heading}[/]")
        for line in lines:
            console.print(f"  - {escape(line)}", highlight=False)


def _render_layers(verdict: PathVerdict, console: Any) -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for heading in ("watermark", "layer", "Acc", "own top-k", "mass triggered", "mass clean", "ratio"):
        table.add_column(heading, justify="right")
    for number, score in enumerate(verdict.scores):
        for row in score.layers:
            masses = ["-", "-", "-"]
            if row.mass_triggered is not None and row.mass_clean is not None:
                ratio = f"{row.mass_triggered / row.mass_clean:.1f}" if row.mass_clean else "-"
                masses = [f"{row.mass_triggered:.3f}", f"{row.mass_clean:.3f}", ratio]
            erased = " (erased)" if row.layer in verdict.erased_layers else ""
            accuracies = [f"{row.accuracy.value:.3f}", f"{row.accuracy_own_topk.value:.3f}"]
            table.add_row(str(number), f"{row.layer}{erased}", *accuracies, *masses)
    console.print(table)
    for number, score in enumerate(verdict.scores):
        console.print(f"watermark {number}: Acc {score.accuracy.value:.3f}, WSR {score.wsr}")
    if verdict.decoys is not None:
        console.print(f"Control: {verdict.decoys}")
    if verdict.id is not None:
        console.print(f"Id read from the routing: {verdict.id}")
