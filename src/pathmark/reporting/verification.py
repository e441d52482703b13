"""The page of a verification: the verdict first, then what was seen, how sure that is, and how to check it.

From an evidence bundle with everything; from a command's JSON without what only an opened claim may show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pathmark.reporting.layout import Cell, Page, Section, Table, Tone, Verdict, code, row
from pathmark.reporting.routing import barcode_picture, heat_maps, null_picture, path_table
from pathmark.results.evidence import EvidenceBundle, MeasuredWatermark, Run, Suspect

ODD_CONTROLS = 0.01
"""Chance below which controls, charged for their number, speak against a verdict."""
TONES: Mapping[str, Tone] = {"marked": "yes", "not marked": "no", "undecided": "undecided"}
TITLES = {"marked": "Found", "not marked": "Not found", "undecided": "Undecided"}
FIGURES = {
    "p_value": "chance, as the owner reads it (p)", "p_floor": "smallest chance this key can show",
    "p_third_party": "chance, as a third party reads it", "significance": "level of the verdict", "id": "id read",
    "wsr": "share of texts that take the path (WSR)", "accuracy": "share of hits (Acc)", "n_probes": "texts",
    "n_tokens": "tokens", "endpoint": "endpoint", "marks_seen": "marks seen", "failures": "requests that failed",
}  # fmt: skip


def verdict_page(verdict: Mapping[str, Any]) -> Page:
    """The page of what a verifying command printed with --json."""
    return _page(verdict, [figures_section(verdict), *_layers(verdict), _limits(verdict), _how_to_keep()])


def trace_page(found: Mapping[str, Any]) -> Page:
    """The page of what a tracing command printed with --json."""
    return _page(found, [figures_section(found), _ranking(found), _how_to_keep()])


def bundle_page(bundle: EvidenceBundle, name: str) -> Page:
    """The page of an evidence bundle; `name` is what the reader calls it."""
    verdict, measured = bundle.verdict, bundle.measured
    sections = []
    for found in () if measured is None else measured.watermarks:
        sections += routing_sections(found, single=len(measured.watermarks) == 1 if measured else True)
    return _page(
        verdict,
        [
            *sections, *_exchanges(bundle), figures_section(verdict),
            *([_ranking(verdict)] if "ranking" in verdict else [_controls(verdict), _limits(verdict)]),
            _examined(bundle.suspect, bundle.run), _how_to_check(name, bundle),
        ],
    )  # fmt: skip


def routing_sections(found: MeasuredWatermark, *, single: bool = True) -> list[Section]:
    """One opened watermark: where the tokens went, one text token by token, the chance, the barcodes."""
    tag = "" if single else f"-{found.watermark}{'-fed' if found.reading != 'as it is' else ''}"
    which = "" if single else f", watermark {found.watermark} {found.reading}"
    return [
        Section(
            name=f"routing{tag}",
            title=f"Where the tokens went{which}",
            paragraphs=[
                "The same texts, with the secret trigger in front and without. Each row is a layer of the model, each "
                "column one of its experts. Boxes are drawn around the experts that the key names."
            ],
            pictures=heat_maps(found, tag),
        ),
        Section(
            name=f"path{tag}",
            title=f"One text, token by token{which}",
            paragraphs=["For each token the experts that it was sent to. Those that the key names are underlined."],
            tables=path_table(found),
        ),
        Section(
            name=f"chance{tag}",
            title=f"How unlikely that is{which}",
            paragraphs=[
                f"The key could have named any of {_grouped(found.exact.n_paths)} paths. If the secret had nothing to "
                "do with this model, each of them would be as good as any other."
            ],
            pictures=[null_picture(found, tag)],
        ),
        Section(
            name=f"barcodes{tag}",
            title=f"Barcodes of the path{which}",
            paragraphs=[_barcode_words(found)],
            pictures=[
                barcode_picture(f"barcode-expected{tag}", "Expected: what the key says.", found.barcodes.expected),
                barcode_picture(
                    f"barcode-recovered{tag}", "Recovered: what the routing says, read without being told the id.",
                    found.barcodes.recovered,
                ),
            ],
        ),
    ]  # fmt: skip


def figures_section(verdict: Mapping[str, Any]) -> Section:
    """The figures behind the verdict."""
    rows = [row(words, _shown(verdict[name])) for name, words in FIGURES.items() if verdict.get(name) is not None]
    for name, words in (("match_rate", "replies with their mark"), ("controls", "control replies with a mark")):
        if isinstance(rate := verdict.get(name), Mapping) and "hits" in rate:
            rows.append(row(words, f"{rate['hits']} of {rate['n']}"))
    return Section(
        name="figures", title="Figures", tables=[Table("What the verdict rests on", ("figure", "value"), rows)]
    )


def _page(verdict: Mapping[str, Any], sections: Sequence[Section]) -> Page:
    suspect = str(verdict.get("suspect", "A suspect"))
    found: str
    tone: Tone
    if "ranking" in verdict:
        named = verdict["licensee"]
        found, tone = ("Nobody is named", "no") if named is None else (f"The copy of {named}", "yes")
    else:
        found, tone = TITLES[verdict["verdict"]], TONES[verdict["verdict"]]
    return Page(
        kind=kind_of_verdict(verdict),
        title=f"{found}: {suspect}",
        subtitle=f"Examined from {verdict['access']}." if verdict.get("access") else "",
        verdicts=[Verdict(tone, verdict["words"])],
        sections=sections,
    )


def kind_of_verdict(verdict: Mapping[str, Any]) -> str:
    """What a verdict is about: whether the mark is there, or whose copy it is."""
    return "tracing" if "ranking" in verdict else "verification"


def _ranking(found: Mapping[str, Any]) -> Section:
    rows = [row(one["licensee"], one["id"], Cell(f"{one['p_value']:.2g}", one["p_value"])) for one in found["ranking"]]
    return Section(
        name="ranking",
        title="All licensees",
        paragraphs=["How well the path of each licensee's copy explains what was seen; the smallest chance first."],
        tables=[Table("Licensees", ("licensee", "id", "chance (p)"), rows, True)],
    )


def _layers(verdict: Mapping[str, Any]) -> list[Section]:
    """Routing mass on the targets, layer by layer, where the verdict has it and no bundle shows more."""
    rows = [
        row(f"{layer['watermark']}", layer["layer"], f"{layer['accuracy']:.3f}", *(
            "-" if layer[name] is None else f"{layer[name]:.3f}" for name in ("mass_triggered", "mass_clean")
        ))
        for layer in verdict.get("layers", ())
    ]  # fmt: skip
    if not rows:
        return []
    head = ("watermark", "layer", "share of hits", "mass on the targets, triggered", "mass on the targets, clean")
    return [
        Section(
            name="layers",
            title="Layer by layer",
            paragraphs=[
                "The same texts, with the secret trigger in front and without. Which experts are the targets stays "
                "secret."
            ],
            tables=[Table("Marked layers", head, rows)],
        )
    ]


def _controls(verdict: Mapping[str, Any]) -> Section:
    decoys = verdict.get("decoys")
    said = ["No control triggers were tried."]
    if decoys:
        values = decoys["p_values"]
        smallest = min(1.0, len(values) * min(values))
        odd = smallest < ODD_CONTROLS
        said = [
            f"{len(values)} triggers of keys that nobody embedded were put before {decoys['n_probes']} of the texts. A "
            "model that reacts to odd prefixes as such would send them to the same experts.",
            f"The smallest chance among them is {min(values):.2g}. "
            + (
                "That is too small for an accident: this trigger is not the only one that does it."
                if odd
                else "That is what accident gives: only the owner's trigger does it."
            ),
        ]
    rows = [row(f"control {i}", f"{p:.3g}") for i, p in enumerate(decoys["p_values"], 1)] if decoys else []
    tables = [Table("Controls", ("trigger", "p"), rows)] if rows else []
    return Section(name="controls", title="Controls", paragraphs=said, tables=tables)


def _limits(verdict: Mapping[str, Any]) -> Section:
    weak = [*verdict.get("weaknesses", ()), *verdict.get("warnings", ())]
    said = "Nothing known." if not weak else ""
    return Section(name="limits", title="What would weaken this", paragraphs=[said] if said else [], points=weak)


def _exchanges(bundle: EvidenceBundle) -> list[Section]:
    """How many requests and replies the bundle holds, where an API was asked."""
    lines = bundle.transcript
    if not lines:
        return []
    said = f"The bundle holds {len(lines) - 1:,} exchanges with the API, word by word, in transcript.jsonl."
    return [Section(name="exchanges", title="What was asked", paragraphs=[said])]


def _examined(suspect: Suspect, run: Run) -> Section:
    files = [[Cell(file.path), Cell(f"{file.size:,}", file.size), Cell(code(file.sha256))] for file in suspect.files]
    steps = [row(step.when, step.who, step.how, step.root or "not computed") for step in suspect.custody]
    tables = [Table("Files of the suspect", ("file", "bytes", "sha256"), files, True)]
    if steps:
        tables.insert(0, Table("Who had it", ("when", "who", "how", "root on receipt"), steps))
    versions = ", ".join(f"{name} {number}" for name, number in run.versions.items())
    return Section(
        name="examined",
        title="What was examined",
        paragraphs=[
            Markup("The files below have the root {}, as OpenSSF model signing computes it.").format(
                code(suspect.root)
            ),
            f"Examined {run.created} with the key {run.fingerprint}, on {versions}. The bundle opens "
            f"{len(run.revealed)} of the key's {run.watermarks} watermarks; the rest of the key stays secret.",
        ],
        tables=tables,
    )


def _how_to_check(name: str, bundle: EvidenceBundle) -> Section:
    typed = " ".join(bundle.run.command)
    return Section(
        name="check",
        title="Check it, and do it again",
        paragraphs=[
            "This page only shows what the bundle says. The first command checks the bundle offline, without the key: "
            "signatures, digests, the opened claim, the figures. The second runs the suspect again and compares.",
            Markup("The verdict was made by {}.").format(code(typed)) if typed else "",
        ],
        commands=f"pathmark evidence check {name}\npathmark evidence replay {name} --suspect {bundle.suspect.name}",
    )


def _how_to_keep() -> Section:
    return Section(
        name="check",
        title="Let others check it",
        paragraphs=[
            "This page was made from a verdict alone, so nobody can check it. With --evidence DIR the same command "
            "keeps what a third party needs, and the page of that folder shows where the tokens went."
        ],
    )


def _barcode_words(found: MeasuredWatermark) -> str:
    expected, recovered = found.barcodes.expected, found.barcodes.recovered
    if tuple(expected) == tuple(recovered):
        return "Both are the same: the routing spells the path of this key's id."
    silent = sum(index is None for index in recovered)
    if silent:
        return f"{silent} of {len(recovered)} layers do not speak clearly, so no whole path was recovered."
    same = sum(a == b for a, b in zip(expected, recovered, strict=True))
    return f"{same} of {len(expected)} layers agree."


def _grouped(digits: str) -> str:
    return f"{int(digits):,}" if len(digits) <= 18 else f"about 10^{len(digits) - 1}"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
