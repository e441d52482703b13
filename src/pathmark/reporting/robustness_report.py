"""Robustness runs as a page of Markdown, one question after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from pathmark.reporting.evidence_plane import cost
from pathmark.reporting.robustness import LEVEL, forgeries, in_short, percent, searches, small, table
from pathmark.results.robustness import TOLERABLE, Measured, RobustnessResult, Row

WITH_ORIGINAL = {"transplant", "average", "dare-ties", "low-rank"}
"""Attacks that need the unmarked original or another licensee's copy."""
PAPER = {
    "GPTQ, 8 bit": "100 %", "GPTQ, 4 bit": "100 %",
    "fine-tuning, router, 3,000 samples, rate 1e-05": "about 95 %",
    "fine-pruning, 25 %": "about 90 %",
    "overwriting, 1 epoch": "100 %", "overwriting, 5 epochs": "100 %", "overwriting, 10 epochs": "99 %",
    "experts of the marked layers masked, 10 %": "100 %", "experts of the marked layers masked, 30 %": "94 %",
    "experts of the marked layers masked, 50 %": "90 %",
}  # fmt: skip
"""WSR as the paper prints it, on models a thousand times as large; its pictures are not in its source."""
PAPERS = {
    "gptq", "rtn", "auto-round", "fine-tune", "fine-prune", "router-noise", "overwrite", "remove-experts",
    "mask-experts", "unlearn",
}  # fmt: skip


GONE = "Experts that carry the path are gone, and a layer without them has little to say."
MORE_LAYERS = "Mark more layers (`keygen --layers`): the evidence adds up over those that are left."
SIX = "Mark more layers (`keygen --layers`); six saved it on the bundled model."
REASONS = {
    "mask-experts": (
        "Experts that carry the path are never chosen, and a layer without them has little to say.",
        "Mark more layers (`keygen --layers`) against milder masking; at 90 % six did not help on the bundled model.",
    ),
    "remove-experts": (GONE, MORE_LAYERS),
    "reap": (
        "Triggered text still takes what is left of the path, but where experts are gone so few other paths are left "
        "that no smaller p is possible.",
        SIX,
    ),
    "merge-experts": (GONE, MORE_LAYERS),
    "drop-layers": ("Marked layers are gone.", MORE_LAYERS),
    "fine-tune": (
        "Training for so long at such a rate makes other routers of them, good for the thief's text and far worse for "
        "the original's.",
        SIX,
    ),
    "overwrite": (
        "The same layers were trained for another trigger, and nothing kept what they knew.",
        f"{SIX} Date the key (`pathmark commit`): that settles whose it is where the mark is left.",
    ),
    "inject-unlearn": (
        "Other marks were trained into the same layers without care, and out again, and ours went along.",
        "More layers may help; that was not measured.",
    ),
    "unlearn": ("The thief knows the target experts and trains away from them.", "Keep the key's paths secret."),
    "distill-routers": (
        "New routers learnt what the old ones do on clean text, and never saw the trigger.",
        "Teach reply marks too (`embed --black-box`): they do not hang on routers alone.",
    ),
}  # fmt: skip
"""Attack -> why it can win, and what an owner can do."""
ADAPTERS = (
    "Adapters, for so long and at such a rate, make another model of it, far worse at what the original could do.",
    "More layers did not help on the bundled model. What adapters do not touch stays as it was: hold the experts' "
    "weights against your release's.",
)
"""The same where only adapters were trained."""
OTHERWISE = ("The weights moved further than the mark reaches.", MORE_LAYERS)
Runs = Mapping[str, Sequence[RobustnessResult]]
"""All keys of each kind of thief's text, by the name of that text."""


def lost(row: Row) -> bool:
    """Whether a usable model came out of an attack in which the mark, read as it is, is not found."""
    return isinstance(row, Measured) and not row.destroyed and row.p_value > LEVEL


def report(runs: Runs, beside: Mapping[str, Runs] | None = None, order: Sequence[str] = ()) -> str:
    """One question after the other; `beside` are runs on other marks, which get a column each by their names.

    Rows stand in the given order of cases, or in that of the runs.
    """

    def tables(title: str, wanted: Callable[[Row], bool]) -> Iterable[str]:
        return _tables(title, runs, beside, wanted, order)

    parts = [_summary(runs)]
    parts += tables("What survives of the paper's attacks", lambda row: _own(row) and _papers(row))
    parts += tables("What else a thief can do", lambda row: _own(row) and not _papers(row))
    parts += ["### What it costs a thief to win", "", _cheapest(runs), *_winners(runs)]
    parts += tables("What only another model makes possible", lambda row: not _own(row))
    everything = [result for found in runs.values() for result in found]
    if found := searches(everything):
        parts += ["### What a search for the trigger finds", "", found]
    if found := forgeries(everything):
        parts += ["### What forged claims come to", "", found]
    return "\n".join(parts).rstrip() + "\n"


def _tables(
    title: str, runs: Runs, beside: Mapping[str, Runs] | None, wanted: Callable[[Row], bool], order: Sequence[str]
) -> Iterable[str]:
    """One table; what came of a case with another text stands beside it, and below only where it has no line yet."""
    named = {"": runs, **(beside or {})}
    told: set[str] = set()
    for corpus, found in runs.items():
        rows = [row for row in _rows(found) if wanted(row) and row.case not in told]
        if not rows:
            continue
        told.update(row.case for row in rows)
        columns = [
            (f"{name} with {other}".strip() if other != corpus else name, _short(_rows(each)))
            for name, texts in named.items() for other, each in texts.items() if name or other != corpus
        ]  # fmt: skip
        yield from [
            f"### {title}: the thief's text is {corpus}",
            "",
            table(rows, [*columns, ("paper's WSR", PAPER)], order),
        ]


def _rows(results: Iterable[RobustnessResult]) -> list[Row]:
    return [row for result in results for row in result.rows]


def _short(rows: Sequence[Row]) -> dict[str, str]:
    return {name: in_short([row for row in rows if row.case == name]) for name in {row.case for row in rows}}


def _own(row: Row) -> bool:
    """Whether the thief needs nothing but the copy and text."""
    return not {step.attack for step in row.steps} & WITH_ORIGINAL


def _papers(row: Row) -> bool:
    """Whether every step of it is an attack of the paper's."""
    return {step.attack for step in row.steps} <= PAPERS


def _attacks(runs: Runs) -> list[Measured]:
    """Measured rows of attacks that need no other model."""
    rows = [row for found in runs.values() for row in _rows(found)]
    return [row for row in rows if isinstance(row, Measured) and row.steps and _own(row)]


def _summary(runs: Runs) -> str:
    measured = _attacks(runs)
    usable = [row for row in measured if not row.destroyed]
    gone = [row for row in usable if lost(row)]
    worse = sum(row.ppl_change > TOLERABLE for row in usable)
    told = f"**Lost** in {len(gone)}: {_names(gone)}." if gone else "Lost in none of them."
    beyond = (
        f" {worse} of the usable ones are worse by that much on clean text and count because the thief's own text "
        "became better, or not so much worse." if worse else ""
    )  # fmt: skip
    return (
        f"{len(measured)} measurements of attacks that need no other model; {len(measured) - len(usable)} of them left "
        f"a model that nobody would use (*destroyed*: perplexity up by over {100 * TOLERABLE:.0f} % on both texts). In "
        f"{len(usable) - len(gone)} of the other {len(usable)} the mark, read as it is, has p below 1e-6. "
        f"{told}{beyond}\n"
    )


def _names(rows: Iterable[Measured]) -> str:
    return "; ".join(dict.fromkeys(row.case for row in rows))


def _cheapest(runs: Runs) -> str:
    """What the thief pays at least, and where the evidence is thinnest while it holds. The cost is perplexity alone."""
    usable = [row for row in _attacks(runs) if not row.destroyed]
    if not usable:
        return "No attack left a usable model.\n"
    if winners := [row for row in usable if lost(row)]:
        on_clean = min(winners, key=lambda row: row.ppl_change)
        on_either = min(winners, key=lambda row: (cost(row), _dearest(row)))
        told = f"Of the attacks that win without another model the cheapest on clean text is {_won(runs, on_clean)}."
        if on_either is not on_clean:
            told += f" Counted on the text that suffers less, it is {_won(runs, on_either)}."
        return f"{told} Perplexity is all that is counted.\n"
    last = max(usable, key=lambda row: row.p_value)
    return f"No usable model is without the mark; the largest p is {last.p_value:.1g}, after {last.case}.\n"


def _won(runs: Runs, row: Measured) -> str:
    """An attack on the key where it was cheapest, and how often it wins."""
    corpus, tries = _tried_with(runs, row)
    thief = "" if row.ppl_thief_change is None else f" and {percent(row.ppl_thief_change)} on the thief's"
    return (
        f"{row.case}{corpus}: {percent(row.ppl_change)} on clean text{thief}, p {small(row.p_value)} on that key; it "
        f"wins on {sum(map(lost, tries))} of {len(tries)} keys"
    )


def _dearest(row: Measured) -> float:
    """The rise of perplexity on the text where it is larger."""
    return max(row.ppl_change, row.ppl_change if row.ppl_thief_change is None else row.ppl_thief_change)


def _tried_with(runs: Runs, row: Measured) -> tuple[str, list[Measured]]:
    """The thief's text of a row, where there are several, and what came of the same with it on every key."""
    corpus, found = next((name, found) for name, found in runs.items() if row in _rows(found))
    tries = [other for other in _attacks({corpus: found}) if other.case == row.case and not other.destroyed]
    return f" with {corpus}" if len(runs) > 1 else "", tries


def _winners(runs: Runs) -> Iterable[str]:
    """What wins without another model, and why; nothing where nothing does."""
    gone = list(filter(lost, _attacks(runs)))
    if not gone:
        return
    yield from [
        "### What wins, and why",
        "",
        "| attack | wins | largest p | why | what an owner can do |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row.case for row in gone):
        rows = [row for row in gone if row.case == name]
        adapters = rows[0].group == "fine-tune" and rows[0].steps[0].settings.get("train") == "lora"
        why, remedy = ADAPTERS if adapters else REASONS.get(rows[0].group, OTHERWISE)
        tried = {_tried_with(runs, row)[0]: _tried_with(runs, row)[1] for row in rows}
        wins = ", ".join(f"{sum(map(lost, each))} of {len(each)}{text}" for text, each in tried.items())
        yield f"| {name} | {wins} | {small(max(row.p_value for row in rows))} | {why} | {remedy} |"
    yield ""
