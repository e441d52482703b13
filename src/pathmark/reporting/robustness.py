"""A robustness run as a table and as a plot: how much evidence is left against what the attack cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pathmark.errors import MissingLibraryError
from pathmark.results.robustness import Measured, RobustnessResult, Row, Search, Unmeasured
from pathmark.stats import Rate

LEVEL = 1e-6
"""Of a verdict."""
HEADINGS = (
    "attack", "WSR", "exact p", "grafted: WSR, p", "id", "black box", "clean perplexity", "on the thief's text",
    "verdict",
)  # fmt: skip


def table(rows: Sequence[Row], paper: Mapping[str, str] | None = None) -> str:
    """Markdown, a line per case; several keys of a case stand in one line. Failures stand as such.

    `paper` has what the paper prints for a case; it gets a column where it has something to say.
    """
    printed = {row.case: (paper or {}).get(row.case, "") for row in rows}
    more = ["paper's WSR"] if any(printed.values()) else []
    lines = ["| " + " | ".join([*HEADINGS, *more]) + " |", "|---|" + "---|" * (len(HEADINGS) + len(more) - 1)]
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    for name, found in cases.items():
        measured = [row for row in found if isinstance(row, Measured)]
        failed = [row for row in found if isinstance(row, Unmeasured)]
        if measured:
            line = [name, *cells(measured)]
        else:
            line = [name, *[""] * (len(HEADINGS) - 2), f"{failed[0].status}: {failed[0].reason}"]
        lines.append("| " + " | ".join([*line, *([printed[name]] if more else [])]) + " |")
    return "\n".join(lines) + "\n"


def adversaries(result: RobustnessResult) -> str:
    """Markdown: what a search for the trigger found, and what forged claims came to; empty where neither was run."""
    lines = []
    for search in result.searches:
        tried = ", ".join(f"{count:,} {kind}" for kind, count in search.tried.items())
        fired = search.suspicious_that_fire
        total = sum(search.tried.values())
        kinds = f" ({', '.join(search.kinds_that_fire)})" if search.kinds_that_fire else ""
        lines += [
            "",
            f"Search for the trigger: {total:,} prefixes ({tried}), {search.tokens:,} tokens, "
            f"{search.gradients} gradients, {search.seconds:.0f} s. {search.suspicious} looked suspicious to "
            f"the thief; of those {'none' if fired is None else fired} set the path off, of all that got a "
            f"second look {search.looked_at_that_fire}{kinds}. " + found_words(search),
        ]
    if result.forgery:
        lines += ["", "| forged claim | tried | log10 p at face value | charged, bits | log10 p for a third party | |"]
        lines.append("|---|---|---|---|---|---|")
        for row in result.forgery:
            verdict = "**accepted**" if row.accepted else "refused"
            lines.append(
                f"| {row.name} | {row.tried:,} | {row.log10_p:.1f} | {row.charge_bits} | "
                f"{row.log10_p_third_party:.1f} | {verdict} |"
            )
    return "\n".join([*lines, ""]) if lines else ""


def found_words(search: Search) -> str:
    """Whether a search came to the trigger, or to prefixes that work like it."""
    if search.trigger_itself:
        return "The trigger was **found**, token for token."
    return "**Prefixes that work like the trigger were found.**" if search.found else "The trigger was not found."


def cells(rows: Sequence[Measured]) -> list[str]:
    """WSR pooled over keys with its interval, the worst p, both grafted, ids, replies, the mean cost, the verdict."""
    asked = [Rate(row.black_box.hits, row.black_box.n) for row in rows if row.black_box is not None]
    change = sum(row.ppl_change for row in rows) / len(rows)
    ppl = sum(row.ppl for row in rows) / len(rows)
    right = sum(row.id_right for row in rows)
    several = len(rows) > 1
    fed = [row.grafted for row in rows if row.grafted is not None]
    return [
        str(_pooled([row.wsr for row in rows])),
        f"{max(row.p_value for row in rows):.1e}",
        f"{_pooled([one.wsr for one in fed])}, {max(one.p_value for one in fed):.1e}" if fed else "-",
        f"{right} of {len(rows)}" if several else ("right" if right else "lost"),
        str(_pooled(asked)) if asked else "-",
        f"{ppl:.1f} ({_percent(change)})",
        _on_thiefs_text(rows),
        _verdict(rows) + _second(rows),
    ]


def _on_thiefs_text(rows: Sequence[Measured]) -> str:
    measured = [(row.ppl_thief, row.ppl_thief_change) for row in rows]
    known = [(ppl, change) for ppl, change in measured if ppl is not None and change is not None]
    if not known:
        return "-"
    ppl, change = (sum(values) / len(known) for values in zip(*known, strict=True))
    return f"{ppl:.1f} ({_percent(change)})"


def _verdict(rows: Sequence[Measured]) -> str:
    """Of models that somebody would use, read as they are; what an attack destroyed decides nothing."""
    usable = [row for row in rows if not row.destroyed]
    if not usable:
        return "destroyed"
    found = sum(row.p_value <= LEVEL for row in usable)
    several = f" {found} of {len(usable)}" if len(rows) > 1 else ""
    if found == len(usable):
        return f"marked{several}"
    rescued = sum(row.marked and row.p_value > LEVEL for row in usable)
    told = "**lost**" if not found else f"marked{several}, **lost** in {len(usable) - found}"
    return told + (f" (found in {rescued} behind the original's lower layers)" if rescued else "")


def _second(rows: Sequence[Measured]) -> str:
    """The thief's own mark where it was put on top, and whose release an arbiter finds to be the prior one."""
    prior = [row.dispute.prior for row in rows if row.dispute is not None]
    if not prior:
        return ""
    owners, thiefs = prior.count(0), prior.count(1)
    found = f"owner's {owners}, thief's {thiefs}, undecided {len(prior) - owners - thiefs}"
    second = _pooled([row.thief_wsr for row in rows if row.thief_wsr is not None])
    return f"; thief's mark {second}; prior release: {found}"


def evidence_left(row: Measured) -> float:
    """-log10 of the p that decides: of two readings the better one, charged for two."""
    return -row.log10_p if row.grafted is None else -min(row.log10_p, row.grafted.log10_p) - math.log10(2)


def _percent(change: float) -> str:
    return f"{100 * change:+.1f} %" if change < 10 else f"x {1 + change:.0f}"


def _pooled(rates: Sequence[Rate]) -> Rate:
    return Rate(sum(rate.hits for rate in rates), sum(rate.n for rate in rates))


def plot(results: Sequence[tuple[str, Sequence[Row]]], path: Path) -> None:
    """Evidence, -log10 p of the better reading, against utility, the rise in perplexity; one panel per (name, rows)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingLibraryError("the plot needs matplotlib; install pathmark[plots]") from error
    figure = Figure(figsize=(7.5 * len(results), 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    shown: dict[str, Any] = {}
    measured = [(name, [row for row in rows if isinstance(row, Measured)]) for name, rows in results]
    groups = sorted({row.group for _, rows in measured for row in rows})
    for panel, (name, rows) in zip(panels, measured, strict=True):
        _draw_panel(panel, name, rows, groups, shown)
    panels[-1].legend(
        handles=[shown[group] for group in groups],
        fontsize=7,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
    )
    figure.savefig(path, dpi=120)


def _draw_panel(panel: Any, name: str, rows: Sequence[Measured], groups: Sequence[str], shown: dict[str, Any]) -> None:
    """One result; `shown` collects what the legend needs."""
    markers = "osD^v<>PX*hp"
    for number, group in enumerate(groups):
        if chosen := [row for row in rows if row.group == group]:
            cost = [max(100 * row.ppl_change, 0.01) for row in chosen]
            (shown[group],) = panel.plot(
                cost, [evidence_left(row) for row in chosen], markers[number % len(markers)],
                color=f"C{number % 10}", markersize=7, alpha=0.8, markeredgecolor="white", label=group,
            )  # fmt: skip
    panel.axhline(6, color="0.4", linewidth=1, linestyle="--")
    panel.annotate("level 1e-6", (0.01, 6), textcoords="offset points", xytext=(2, 4), fontsize=8, color="0.3")
    panel.set_xscale("log")
    panel.set_xlabel("rise of clean perplexity, % (0.01 stands for none)")
    panel.set_ylabel("evidence left, -log10 p")
    panel.set_title(name)
    panel.grid(alpha=0.25)
