"""A robustness run as a table: how much evidence is left against what the attack cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pathmark.results.robustness import Measured, RobustnessResult, Row, Search, Unmeasured
from pathmark.stats import Rate

LEVEL = 1e-6
"""Of a verdict."""
HEADINGS = ("attack", "WSR", "exact p", "id", "black box", "clean perplexity", "on the thief's text", "verdict")
SELDOM = ("black box", "on the thief's text")
"""Headings that a table shows only where a row has something to say."""
Column = tuple[str, Mapping[str, str]]
"""A further column: its heading, and what it says of a case."""


def table(rows: Sequence[Row], more: Sequence[Column] = (), order: Sequence[str] = ()) -> str:
    """Markdown, a line per case; several keys of a case stand in one line. Failures stand as such.

    `more` are further columns; each is shown where it has something to say. Cases stand in `order`, if there is one.
    """
    cases = _in_order(rows)
    if order:
        cases.sort(key=lambda case: order.index(case) if case in order else len(order))
    lines = {name: cells([row for row in rows if row.case == name]) for name in cases}
    for heading, said in more:
        for name, line in lines.items():
            line[heading] = said.get(name, "")
    seldom = {*SELDOM, *(heading for heading, _ in more)}
    shown = [h for h in next(iter(lines.values()), {}) if h not in seldom or any(line[h] for line in lines.values())]
    head = ["| " + " | ".join(["attack", *shown]) + " |", "|" + "---|" * (1 + len(shown))]
    return "\n".join(head + [_line(name, *(line[h] for h in shown)) for name, line in lines.items()]) + "\n"


def _in_order(rows: Sequence[Row]) -> list[str]:
    """Every case once; one that only a later key has stands behind the case that it stands behind there."""
    order: list[str] = []
    for before, row in zip((None, *rows), rows, strict=False):
        if row.case not in order:
            order.insert(0 if before is None else order.index(before.case) + 1, row.case)
    return order


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def searches(results: Sequence[RobustnessResult]) -> str:
    """Markdown: what searches for the trigger found, a line for each budget; empty where none was made."""
    found = [search for result in results for search in result.searches]
    if not found:
        return ""
    lines = [
        "| keys | prefixes | gradients | looked suspicious | of those fire | of all looked at again fire | |",
        "|---|---|---|---|---|---|---|",
    ]
    for budget in dict.fromkeys(search.gradients for search in found):
        alike = [search for search in found if search.gradients == budget]
        fired = [search.suspicious_that_fire for search in alike if search.suspicious_that_fire is not None]
        kinds = ", ".join(dict.fromkeys(kind for search in alike for kind in search.kinds_that_fire))
        again = pooled_rate([search.looked_at_that_fire for search in alike])
        lines.append(_line(
            str(len(alike)), f"{sum(sum(search.tried.values()) for search in alike):,}", f"{budget} each",
            str(sum(search.suspicious for search in alike)), str(pooled_rate(fired)) if fired else "none",
            f"{again} ({kinds})" if kinds else str(again), " ".join(dict.fromkeys(map(found_words, alike))),
        ))  # fmt: skip
    return "\n".join(lines) + "\n"


def forgeries(results: Sequence[RobustnessResult]) -> str:
    """Markdown: what forged claims came to; empty where none was tried."""
    found = [row for result in results for row in result.forgery or ()]
    if not found:
        return ""
    lines = [
        "| forged claim | tried | log10 p at face value | charged, bits | log10 p for a third party | |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        verdict = "**accepted**" if row.accepted else "refused"
        lines.append(_line(
            row.name, f"{row.tried:,}", f"{row.log10_p:.1f}", str(row.charge_bits), f"{row.log10_p_third_party:.1f}",
            verdict,
        ))  # fmt: skip
    return "\n".join(lines) + "\n"


def found_words(search: Search) -> str:
    """Whether a search came to the trigger, or to prefixes that work like it."""
    if search.trigger_itself:
        return "The trigger was **found**, token for token."
    return "**Prefixes that work like the trigger were found.**" if search.found else "The trigger was not found."


def cells(rows: Sequence[Row]) -> dict[str, str]:
    """Of the keys of one case, by heading: WSR pooled with its interval, the worst p, ids, mean costs, the verdict."""
    measured = [row for row in rows if isinstance(row, Measured)]
    if not measured:
        failed = next(row for row in rows if isinstance(row, Unmeasured))
        return dict.fromkeys(HEADINGS[1:-1], "") | {"verdict": f"{failed.status}: {failed.reason}"}
    right = sum(row.id_right for row in measured)
    asked = [Rate(row.black_box.hits, row.black_box.n) for row in measured if row.black_box is not None]
    return {
        "WSR": str(pooled_rate([row.wsr for row in measured])),
        "exact p": _worst(measured),
        "id": f"{right} of {len(measured)}" if len(rows) > 1 else ("right" if right else "lost"),
        "black box": str(pooled_rate(asked)) if asked else "",
        "clean perplexity": _mean([(row.ppl, row.ppl_change) for row in measured]),
        "on the thief's text": _mean([(row.ppl_thief, row.ppl_thief_change) for row in measured]),
        "verdict": _verdict(measured) + _second(measured),
    }


def _worst(rows: Sequence[Measured]) -> str:
    """The largest p, and whether it is the smallest that the attack has left possible, where that is over the level."""
    worst = max(rows, key=lambda row: row.p_value)
    at_floor = worst.p_value > LEVEL and worst.p_value <= worst.p_floor * (1 + 1e-9)
    return f"{small(worst.p_value)} (no smaller one is left)" if at_floor else small(worst.p_value)


def small(p: float) -> str:
    """Two digits, and more where two would hide on which side of the level it is."""
    return f"{p:.3e}" if p != LEVEL and f"{p:.1e}" == f"{LEVEL:.1e}" else f"{p:.1e}"


def in_short(rows: Sequence[Row]) -> str:
    """The same in one cell: counts with their interval in percent, p, what it cost on both texts, and the verdict where
    it is not simply that the mark was found.
    """
    line = cells(rows)
    if not line["WSR"]:
        return line["verdict"]
    measured = [row for row in rows if isinstance(row, Measured)]
    wsr = pooled_rate([row.wsr for row in measured])
    low, high = (f"{100 * end:.1f}" for end in wsr.interval())
    means = [
        _mean_change([row.ppl_change for row in measured]),
        _mean_change([row.ppl_thief_change for row in measured]),
    ]
    costs = " / ".join(percent(change) for change in means if change is not None)
    verdict = "" if line["verdict"] in ("marked", f"marked {len(measured)} of {len(measured)}") else line["verdict"]
    return "; ".join(filter(None, [f"{wsr.hits}/{wsr.n} [{low}, {high}]", line["exact p"], costs, verdict]))


def _mean(measured: Sequence[tuple[float | None, float | None]]) -> str:
    change = _mean_change([change for _, change in measured])
    known = [ppl for ppl, _ in measured if ppl is not None]
    return "" if change is None else f"{sum(known) / len(known):.1f} ({percent(change)})"


def _mean_change(changes: Sequence[float | None]) -> float | None:
    known = [change for change in changes if change is not None]
    return sum(known) / len(known) if known else None


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
    second = pooled_rate([row.thief_wsr for row in rows if row.thief_wsr is not None])
    return f"; thief's mark {second}; prior release: {found}"


def evidence_left(row: Measured) -> float:
    """-log10 of the p that decides: of two readings the better one, charged for two."""
    return -row.log10_p if row.grafted is None else -min(row.log10_p, row.grafted.log10_p) - math.log10(2)


def percent(change: float) -> str:
    """A change for people; as a factor where it is large."""
    return f"{100 * change:+.1f} %" if change < 10 else f"x {1 + change:.0f}"


def pooled_rate(rates: Sequence[Rate]) -> Rate:
    """Of several samples together."""
    return Rate(sum(rate.hits for rate in rates), sum(rate.n for rate in rates))
