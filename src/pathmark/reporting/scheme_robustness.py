"""A robustness run on another scheme's mark, as a table."""

from __future__ import annotations

from pathmark.reporting.robustness import percent
from pathmark.results.robustness import Unmeasured
from pathmark.results.schemes import SchemeMeasured, SchemeRobustness

HEADINGS = ("attack", "WSR", "p", "clean perplexity", "on the thief's text", "verdict")


def scheme_cells(row: SchemeMeasured) -> list[str]:
    """The figures of one attack."""
    change = row.ppl_thief_change
    return [
        str(row.wsr),
        f"{row.p_value:.1e}",
        f"{row.ppl:.1f} ({percent(row.ppl_change)})",
        "-" if change is None else f"{row.ppl_thief:.1f} ({percent(change)})",
        "destroyed" if row.destroyed else "marked" if row.marked else "**lost**",
    ]


def scheme_table(result: SchemeRobustness) -> str:
    """Markdown, a line per case; what was not measured says why."""
    lines = [
        f"{result.scheme}: WSR is the share of {result.counted}; the thief's text is {result.corpus}.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    for row in result.rows:
        if isinstance(row, Unmeasured):
            told = [*[""] * (len(HEADINGS) - 2), f"{row.status}: {row.reason}"]
        else:
            told = scheme_cells(row)
        lines.append("| " + " | ".join([row.case, *told]) + " |")
    return "\n".join(lines) + "\n"
