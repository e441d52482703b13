"""An experiment as a page: a table per figure, ours beside the paper's printed number, and what to make of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pathmark.results.experiment import ExperimentResult, Point
from pathmark.results.paper import find_paper
from pathmark.stats import Rate

OURS = "PathMark"
RIVALS = ("KGW", "LearnMark", "IFMark", "EaaW")
KEYS_TO_CLAIM = 3
"""Fewer keys prove nothing about a scheme."""
DESTROYED = "†"
THEIRS = {
    "home": "WikiText-103", "wikitext": "WikiText-103", "ptb": "Penn Treebank",
    "c4": "3,000 texts that the model wrote behind C4 prefixes", "mmlu": "MMLU", "gsm8k": "GSM8K",
}  # fmt: skip
"""Corpus -> what the paper has in its place."""
LOWER_IS_BETTER = "change of PPL, %"
"""The figure besides WSR by which schemes are compared: what a mark costs."""


def page(result: ExperimentResult) -> str:
    """Markdown, from the result file alone."""
    paper = find_paper(result.experiment)
    parts = [f"## {paper.title}", f"`{result.experiment}`, {paper.place} of the paper. {_measured(result)}"]
    figures = scalar_figures(result)
    if len(places := _places(result, figures)) == 1:
        parts.append(f"{places[0]} (ours / paper)\n\n{place_table(result, figures)}")
    else:
        parts += [f"**{figure}** (ours / paper)\n\n{figure_table(result, figure)}" for figure in figures]
    return "\n\n".join([*parts, *_notes(result)]) + "\n"


def pages(results: Sequence[ExperimentResult]) -> str:
    """All of them on one page."""
    return "# The paper's tables and figures, measured here\n\n" + "\n".join(map(page, results))


def scalar_figures(result: ExperimentResult) -> list[str]:
    """Figures that a table can show, ours first, then those that only the paper has."""
    ours = [point.figure for point in result.points if point.values is None]
    printed = find_paper(result.experiment).beside(result.beside)
    return list(dict.fromkeys([*ours, *printed]))


def figure_table(result: ExperimentResult, figure: str) -> str:
    """Places down, series across; all keys of a cell together. A dash where nobody measured or printed anything."""
    series = _series(result, [figure])
    rows = {at: [_cell(result, figure, name, at) for name in series] for at in _places(result, [figure])}
    return _table(series, rows)


def place_table(result: ExperimentResult, figures: Sequence[str]) -> str:
    """The same where there is one place only: figures down."""
    series, (at,) = _series(result, figures), _places(result, figures)
    return _table(series, {figure: [_cell(result, figure, name, at) for name in series] for figure in figures})


def _table(head: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = ["| | " + " | ".join(head) + " |", "|---|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items())])


def _cell(result: ExperimentResult, figure: str, series: str, at: str) -> str:
    where = (figure, series, at)
    found = [p for p in result.points if (p.figure, p.series, p.at) == where and p.values is None]
    printed = find_paper(result.experiment).beside(result.beside)
    broken = f" {DESTROYED}" if any(point.destroyed for point in found) else ""
    return f"{pooled(found)}{broken} / {printed.get(figure, {}).get(series, {}).get(at, '-')}"


def _series(result: ExperimentResult, figures: Sequence[str]) -> list[str]:
    """Columns: ours first, then those that only the paper has."""
    printed = find_paper(result.experiment).beside(result.beside)
    ours = [p.series for p in result.points if p.figure in figures and p.values is None]
    return list(dict.fromkeys([*ours, *(name for figure in figures for name in printed.get(figure, {}))]))


def _places(result: ExperimentResult, figures: Sequence[str]) -> list[str]:
    """Rows, likewise."""
    printed = find_paper(result.experiment).beside(result.beside)
    ours = [p.at for p in result.points if p.figure in figures and p.values is None]
    theirs = [at for figure in figures for row in printed.get(figure, {}).values() for at in row]
    return list(dict.fromkeys([*ours, *theirs]))


def pooled(points: Sequence[Point]) -> str:
    """All keys of a cell: rates added up, other values as their mean and range."""
    rates = [point.rate for point in points if point.rate is not None]
    if rates:
        return str(pooled_rate(rates))
    values = [point.value for point in points if point.value is not None]
    if not values:
        return "-"
    mean = number(sum(values) / len(values))
    return mean if len(values) == 1 else f"{mean} ({number(min(values))} to {number(max(values))})"


def pooled_rate(rates: Iterable[Rate]) -> Rate:
    """All trials together."""
    every = list(rates)
    return Rate(sum(rate.hits for rate in every), sum(rate.n for rate in every))


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def keys_of(result: ExperimentResult) -> int:
    """Different keys in the result."""
    return len({point.key for point in result.points})


def _measured(result: ExperimentResult) -> str:
    keys = keys_of(result)
    return (
        f"Ours: `{result.model}`, {keys} key{'s' * (keys != 1)}, {result.header.n_probes} held-out texts. The paper's: "
        f"{result.beside}. Rates have 95 % intervals, all keys together."
    )


def _notes(result: ExperimentResult) -> list[str]:
    """What differs, what stands for what, what may be claimed and what is missing."""
    notes = [find_paper(result.experiment).differs, *comparison(result)]
    files = result.header.settings.get("files", {})
    rows = {point.at for point in result.points} & THEIRS.keys()  # where they are texts, no others were used
    used = [
        f"{use} ({files[use]}), where the paper has {THEIRS[use]}" if use in files else f"{use} for {THEIRS[use]}"
        for use in result.header.texts_sha256 if use in (rows or THEIRS)
    ]  # fmt: skip
    if used:
        notes.append(f"Texts: {'; '.join(used)}. Their digests are in the result file.")
    if any(point.destroyed for point in result.points):
        notes.append(
            f"{DESTROYED}: perplexity rose by over 50 % on clean text and on the thief's. Nobody would use such a "
            "model, and no scheme is compared by it."
        )
    if result.model.startswith("bundled:"):
        notes.append(
            f"{result.model} is thousands of times smaller than {result.beside}: compare directions, not numbers."
            + (
                " It knows only the texts that it was trained on (home): its perplexity on others means little."
                if any(point.figure.startswith("PPL") for point in result.points) else ""
            )
        )  # fmt: skip
    if result.header.settings["quick"]:
        notes.append(
            "Measured with --quick: few texts and few steps tell whether it works, not how well. Our steps were chosen "
            "so that our mark is found; the other schemes' were only shortened. This compares nobody."
        )
    if result.missing:
        reasons: dict[str, list[str]] = {}
        for name, reason in result.missing.items():
            reasons.setdefault(reason, []).append(name)
        told = (f"- {'; '.join(names)}: {reason}" for reason, names in reasons.items())
        notes.append("Not measured:\n\n" + "\n".join(told))
    return [note for note in notes if note]


def comparison(result: ExperimentResult) -> list[str]:
    """Where ours is above or below another scheme; said only of enough keys, and where intervals do not overlap."""
    said = [*_by_rates(result), *_by_costs(result)]
    if any(point.series == "EaaW" and point.rate is not None for point in result.points):
        said.append("Of EaaW's bits chance alone gets half right.")
    if any(point.series == "IFMark" and point.figure == "WSR" for point in result.points):
        said.append("IFMark's WSR asks for the secret word itself; the paper also takes it with letters repeated.")
    return said


def _by_costs(result: ExperimentResult) -> list[str]:
    """Whose mark costs less perplexity, where the ranges over the keys do not overlap."""
    found = [p for p in result.points if p.figure == LOWER_IS_BETTER and p.value is not None and not p.destroyed]
    less: dict[bool, list[str]] = {True: [], False: []}
    for at in dict.fromkeys(point.at for point in found):
        costs = {name: [p.value for p in found if (p.series, p.at) == (name, at)] for name in (OURS, *RIVALS)}
        for name in RIVALS:
            ours, theirs = ([v for v in costs[one] if v is not None] for one in (OURS, name))
            if min(len(ours), len(theirs)) >= KEYS_TO_CLAIM and (max(ours) < min(theirs) or max(theirs) < min(ours)):
                less[max(ours) < min(theirs)].append(f"{name} ({at})")
    words = {True: "costs less perplexity than", False: "costs more perplexity than"}
    return [f"{OURS} {words[ours]} {', '.join(names)}." for ours, names in less.items() if names]


def _by_rates(result: ExperimentResult) -> list[str]:
    """The same for WSR."""
    found = [point for point in result.points if point.figure == "WSR" and point.rate is not None]
    rivals = [name for name in RIVALS if any(point.series == name for point in found)]
    if not rivals or not any(point.series == OURS for point in found):
        return []
    said: dict[str, list[str]] = {"above": [], "below": []}
    compared = False
    for at in dict.fromkeys(point.at for point in found):
        ours = _rates(found, OURS, at)
        for name in rivals:
            theirs = _rates(found, name, at)
            if min(len(ours), len(theirs)) < KEYS_TO_CLAIM:
                continue
            compared = True
            (low, high), (their_low, their_high) = (pooled_rate(rates).interval() for rates in (ours, theirs))
            if low > their_high or high < their_low:
                said["above" if low > their_high else "below"].append(f"{name} ({at})")
    if not compared:
        return [f"With fewer than {KEYS_TO_CLAIM} keys no scheme is called better than another."]
    sentences = [f"{OURS} is {where} {', '.join(names)}." for where, names in said.items() if names]
    words = " ".join(sentences) or "No two intervals are apart."
    return [f"{words} Each scheme's WSR counts its own thing: texts, instructions or bits."]


def _rates(points: Sequence[Point], series: str, at: str) -> list[Rate]:
    """One rate for each key whose model could still be used."""
    here = [point for point in points if (point.series, point.at) == (series, at) and not point.destroyed]
    return [point.rate for point in here if point.rate is not None]
