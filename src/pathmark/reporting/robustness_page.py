"""The page of a robustness run: evidence against utility, and tables that can be sorted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pathmark.reporting.evidence_plane import cost, draw_plane, kinds_of
from pathmark.reporting.layout import Cell, Page, Section, Table, row
from pathmark.reporting.pictures import INK, PAPER, SOFT, Picture, draw, plain_axes
from pathmark.reporting.robustness import cells, evidence_left, found_words
from pathmark.results.robustness import Measured, RobustnessResult, Row
from pathmark.results.schema import from_json


def robustness_page(results: Mapping[str, Any]) -> Page:
    """The page of the results.json of `pathmark robustness`."""
    found = from_json(RobustnessResult, dict(results), "the result")
    measured = [case for case in found.rows if isinstance(case, Measured)]
    usable = [case for case in measured if case.steps and not case.destroyed]
    left = sum(case.marked for case in usable)
    gone = sum(case.destroyed for case in measured)
    broken = f" {gone} more destroyed the model." if gone else ""
    sections = [_plane(found.rows), _table(found.rows)]
    if found.searches:
        sections.append(_searches(found))
    if found.forgery:
        sections.append(_forgery(found))
    layers = ", ".join(map(str, found.layers))
    return Page(
        kind="robustness run",
        title=f"The mark is found after {left} of {len(usable)} attacks",
        subtitle=f"Marked layers {layers}; {found.header.n_probes} texts behind each figure; the thief trains on "
        f"{found.n_texts:,} texts ({found.corpus}).{broken}",
        sections=[*sections, _about(found)],
    )


def _plane(rows: Sequence[Row]) -> Section:
    measured = [
        (number, case) for number, case in enumerate(rows, 1) if isinstance(case, Measured) and case.steps
    ]  # fmt: skip
    return Section(
        name="plane",
        title="What is left of the evidence, and what that cost the thief",
        paragraphs=[
            "A thief wants to be at the lower left: no evidence left, at no cost. Above the dashed line the mark is "
            "found."
        ],
        pictures=[evidence_picture(measured)] if measured else [],
    )


def evidence_picture(measured: Sequence[tuple[int, Measured]]) -> Picture:
    """One point per attack; those after which the mark is not found have the number of their row."""
    lost = [f"{number} ({case.case})" for number, case in measured if not case.marked and not case.destroyed]
    named = f" Not found after: {', '.join(lost)}." if lost else " It is found after every one."
    kinds = kinds_of([case for _, case in measured])
    return draw(
        "evidence",
        partial(_draw_plane, measured=measured),
        height=4.2 + 0.2 * -(-len(kinds) // 2),
        title="Evidence left against the rise of perplexity",
        described=f"{len(measured)} attacks.{named}",
        caption="Each point is an attack. Right: it cost the thief more, on the text where it cost less. Up: more "
        "evidence is left. Numbers are rows of the table below; only attacks after which the mark is not found have "
        "one.",
    )


def _draw_plane(figure: Any, measured: Sequence[tuple[int, Measured]]) -> None:
    axes = plain_axes(figure)
    rows = [case for _, case in measured]
    draw_plane(axes, rows, kinds_of(rows), ink=SOFT, paper=PAPER)
    for number, case in measured:
        if not case.marked:
            at = cost(case), evidence_left(case)
            axes.annotate(str(number), at, textcoords="offset points", xytext=(6, 4), color=INK, fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=10, handletextpad=0.2, columnspacing=1)


def _table(rows: Sequence[Row]) -> Section:
    asked = any(isinstance(case, Measured) and case.black_box is not None for case in rows)
    head = [
        "row",
        "attack",
        "verdict",
        "evidence left",
        "perplexity",
        "on the thief's text",
        "texts on the path",
        "fed by the original",
        "id",
    ]
    numbered = [_cells(number, case) for number, case in enumerate(rows, 1)]
    if asked:
        head.append("replies")
        numbered = [[*found, _replies(case)] for found, case in zip(numbered, rows, strict=True)]
    return Section(
        name="attacks",
        title="Attack by attack",
        paragraphs=[
            "Press a heading to sort by it. Evidence is -log10 of the p-value that decides. Perplexity is that of "
            "clean text after the attack, of the original's kind and of the thief's. The mark is read in the model as "
            "it is, and in its marked layers fed by the original's lower ones."
        ],
        tables=[Table("Attacks on this copy", head, numbered, True)],
    )


def _cells(number: int, case: Row) -> list[Cell]:
    if not isinstance(case, Measured):
        return [Cell(str(number), number), *row(case.case, f"{case.status}: {case.reason}", *[""] * 6)]
    said = {heading: cell.replace("**", "") for heading, cell in cells([case]).items()}
    fed = case.grafted
    return [
        Cell(str(number), number),
        Cell(case.case),
        Cell(said["verdict"], tone="" if case.destroyed else "good" if case.marked else "bad"),
        Cell(f"{evidence_left(case):.1f}", evidence_left(case)),
        Cell(said["clean perplexity"], case.ppl),
        Cell("") if case.ppl_thief is None else Cell(said["on the thief's text"], case.ppl_thief),
        Cell(f"{case.wsr.hits} of {case.wsr.n}", case.wsr.value),
        Cell("") if fed is None else Cell(f"{fed.wsr.hits} of {fed.wsr.n}, p = {fed.p_value:.1e}", fed.wsr.value),
        Cell(said["id"]),
    ]


def _replies(case: Row) -> Cell:
    if not isinstance(case, Measured) or case.black_box is None:
        return Cell("")
    return Cell(f"{case.black_box.hits} of {case.black_box.n}", case.black_box.hits / case.black_box.n)


def _searches(found: RobustnessResult) -> Section:
    rows = [
        row(
            Cell(f"{sum(search.tried.values()):,}", sum(search.tried.values())),
            Cell(f"{search.tokens:,}", search.tokens),
            Cell(f"{search.gradients:,}", search.gradients), Cell(f"{search.seconds:.0f}", search.seconds),
            search.suspicious, search.looked_at_that_fire, found_words(search).replace("**", ""),
        )
        for search in found.searches
    ]  # fmt: skip
    head = ("prefixes", "tokens", "gradients", "seconds", "suspicious", "fire, of those looked at again", "result")
    return Section(
        name="searches",
        title="Searches for the trigger",
        paragraphs=["What a thief who knows the method, and not the key, found with its budget."],
        tables=[Table("Searches", head, rows, True)],
    )


def _forgery(found: RobustnessResult) -> Section:
    rows = [
        row(
            forged.name, Cell(f"{forged.tried:,}", forged.tried), Cell(f"{forged.log10_p:.1f}", forged.log10_p),
            Cell(f"{forged.log10_p_third_party:.1f}", forged.log10_p_third_party),
            Cell("accepted", tone="bad") if forged.accepted else Cell("refused", tone="good"), forged.reason,
        )
        for forged in found.forgery or ()
    ]  # fmt: skip
    head = ("forged claim", "tried", "log10 p at face value", "log10 p for a third party", "end", "why")
    return Section(
        name="forgery",
        title="Forged claims",
        paragraphs=["What somebody without a key can claim of this model, and what a third party makes of it."],
        tables=[Table("Forged claims", head, rows, True)],
    )


def _about(found: RobustnessResult) -> Section:
    header = found.header
    facts = {
        "package": header.package, "torch": header.torch, "model, sha256": header.model_sha256,
        "original, sha256": header.original_sha256, "key": header.key, "seed": header.seed,
    }  # fmt: skip
    rows = [row(name, value) for name, value in facts.items() if value is not None]
    return Section(
        name="about",
        title="What was measured with what",
        paragraphs=["The same model, key, texts and seed give the same table."],
        tables=[Table("This run", ("what", "value"), rows)],
    )
