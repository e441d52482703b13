"""Robustness runs as a page of Markdown, one question after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pathmark.reporting.robustness import LEVEL, adversaries, table
from pathmark.results.robustness import TOLERABLE, Measured, RobustnessResult, Row

WITH_ORIGINAL = {"transplant", "average", "dare-ties", "low-rank"}
"""Attacks that need the unmarked original or another licensee's copy."""
PAPER = {
    "GPTQ, 8 bit": "100 %", "GPTQ, 4 bit": "100 %",
    "fine-tuning, router, 3,000 samples, best rate": "about 95 %",
    "fine-pruning, 25 %": "about 90 %",
    "overwriting, 1 epochs": "100 %", "overwriting, 5 epochs": "100 %", "overwriting, 10 epochs": "99 %",
    "experts of the marked layers masked, 10 %": "100 %", "experts of the marked layers masked, 30 %": "94 %",
    "experts of the marked layers masked, 50 %": "90 %",
}  # fmt: skip
"""WSR as the paper prints it, on models a thousand times as large; its pictures are not in its source."""
PAPERS_ATTACKS = {
    "none", "gptq", "rtn", "auto-round", "fine-tune", "fine-prune", "router-noise", "overwrite", "remove-experts",
    "mask-experts", "unlearn", "combination",
}  # fmt: skip


def lost(row: Row) -> bool:
    """Whether a usable model came out of an attack in which the mark, read as it is, is not found."""
    return isinstance(row, Measured) and not row.destroyed and row.p_value > LEVEL


def report(results: Mapping[str, Sequence[RobustnessResult]]) -> str:
    """All keys of each kind of thief's text, by the name of that text."""
    parts = [_summary(results)]
    questions: list[tuple[str, Callable[[Row], bool]]] = [
        ("What survives of the paper's attacks", lambda row: _own(row) and row.group in PAPERS_ATTACKS),
        ("What else a thief can do", lambda row: _own(row) and row.group not in PAPERS_ATTACKS),
        ("What only another model makes possible", lambda row: not _own(row)),
    ]
    for title, wanted in questions:
        for corpus, found in results.items():
            rows = [row for result in found for row in result.rows if wanted(row)]
            if rows:
                parts += [f"### {title}: the thief's text is {corpus}", "", table(rows, paper=PAPER)]
    searched = [adversaries(result) for found in results.values() for result in found]
    if any(searched):
        parts += ["### What a search for the trigger finds", *searched]
    return "\n".join(parts).rstrip() + "\n"


def _own(row: Row) -> bool:
    """Whether the thief needs nothing but the copy and text."""
    return not {step.attack for step in row.steps} & WITH_ORIGINAL


def _summary(results: Mapping[str, Sequence[RobustnessResult]]) -> str:
    rows = [row for found in results.values() for result in found for row in result.rows if _own(row)]
    measured = [row for row in rows if isinstance(row, Measured) and row.group != "none" and row.steps]
    usable = [row for row in measured if not row.destroyed]
    gone = [row for row in usable if lost(row)]
    names = sorted({row.case for row in gone})
    told = f"**Lost** in {len(gone)}: {', '.join(names)}." if gone else "Lost in none of them."
    return (
        f"{len(measured)} measurements of attacks that need no other model; {len(measured) - len(usable)} of them left "
        f"a model that nobody would use (*destroyed*: perplexity up by over {100 * TOLERABLE:.0f} % on both texts). "
        f"In {len(usable) - len(gone)} of the other {len(usable)} the mark, read as it is, has p below 1e-6. {told}\n"
    )
