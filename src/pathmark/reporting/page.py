"""Pages from results: one HTML file each, no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pathmark.errors import ReportError
from pathmark.reporting.robustness import HEADINGS, adversaries, cells
from pathmark.results.robustness import Measured, RobustnessResult
from pathmark.results.schema import from_json

STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1c2430, #e8ecf2); --paper: light-dark(#fff, #14181f);
  --line: light-dark(#d9dee6, #333c4a); --mark: #c2410c; --plain: light-dark(#64748b, #94a3b8); }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 52rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .35rem .6rem;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums } td + td, th + th { text-align: right }
.verdict { border-left: 4px solid var(--plain); padding: .1rem 1rem; margin: 1rem 0 }
.verdict.yes { border-color: var(--mark) } svg { width: 100%; height: auto } svg text { fill: var(--ink);
  font: 12px system-ui, sans-serif }
"""


def kind_of(result: Mapping[str, Any]) -> str:
    """What a result is of, told by what it holds."""
    for kind, fields in KINDS.items():
        if fields <= result.keys():
            return kind
    raise ReportError(
        "this is no result that a page can be made of; expected what embed, verify, verify-api, verify-routes or "
        "robustness left as JSON"
    )


def result_page(result: Mapping[str, Any]) -> str:
    """The page of any result."""
    try:
        return PAGES[kind_of(result)](result)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ReportError(f"this result is damaged or of another version: {error}") from error


def summary_page(results: Mapping[str, Any]) -> str:
    """The page of `pathmark demo`: what went in, what it cost, what verification says."""
    embed, verify = results["embed"], results["verify"]
    verdicts = "".join(
        _verdict(f"<b>{escape(name.capitalize())}.</b> {escape(results['words'][name])}", verify[name]["marked"])
        for name in verify
    )
    fit = "fit" if embed["fit"] else "not fit"
    title = f"{escape(results['model'])}, marked with id {results['id']}: {fit} for release"
    body = f"""<p>{escape(results["architecture"])}; layers {", ".join(map(str, results["layers"]))};
{results["id_capacity"]:,} ids; {results["evidence_bits"]:.1f} bits of evidence.</p>
{verdicts}
<h2>Whose copy leaked</h2>
<p>{escape(results["trace"]["words"])}</p>
<h2>Routing mass on the target experts</h2>
{mass_chart(next(iter(verify.values()))["layers"])}
{_cost(embed)}"""
    return _page(title, body)


def embed_page(embed: Mapping[str, Any]) -> str:
    """The page of `pathmark embed`: fit for release or why not, and what the mark cost."""
    title = f"{escape(str(embed.get('output', 'A marked copy')))}: {'fit' if embed['fit'] else 'not fit'} for release"
    return _page(title, "".join(_verdict(escape(problem), False) for problem in embed["problems"]) + _cost(embed))


def verdict_page(verdict: Mapping[str, Any]) -> str:
    """The page of a verification: the verdict, its figures, the layers, and what would weaken it."""
    title = f"{escape(str(verdict.get('suspect', 'A suspect')))}: {escape(verdict['verdict'])}"
    parts = [_verdict(escape(verdict.get("words") or verdict["verdict"]), bool(verdict["marked"]))]
    figures = ("access", "p_value", "p_floor", "p_third_party", "significance", "id", "wsr", "accuracy", "n_probes")
    asked = ("endpoint", "marks_seen", "failures", "max_tokens")
    rows = [(name.replace("_", " "), verdict[name]) for name in (*figures, *asked) if verdict.get(name) is not None]
    rates = [(name.replace("_", " "), verdict[name]) for name in ("match_rate", "controls") if name in verdict]
    rows += [(name, f"{rate['hits']} of {rate['n']}") for name, rate in rates]
    parts.append(f"<h2>Figures</h2>{_table(('', ''), rows)}")
    layers = [row for row in verdict.get("layers", ()) if row["mass_triggered"] is not None]
    if layers and all(row["mass_clean"] is not None for row in layers):
        parts.append(f"<h2>Routing mass on the target experts</h2>{mass_chart(layers)}")
    if weak := [*verdict.get("weaknesses", ()), *verdict.get("warnings", ())]:
        parts.append(f"<h2>What would weaken this</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in weak)}</ul>")
    return _page(title, "".join(parts))


def robustness_page(results: Mapping[str, Any]) -> str:
    """The page of `pathmark robustness`: a row per attack, then the searches and forged claims."""
    rows: list[list[str]] = []
    found = from_json(RobustnessResult, dict(results), "the result")
    for row in found.rows:
        if isinstance(row, Measured):
            rows.append([row.case, *(cell.replace("**", "") for cell in cells([row]))])
        else:
            rows.append([row.case, *[""] * (len(HEADINGS) - 2), f"{row.status}: {row.reason}"])
    more = adversaries(found)
    body = _table(HEADINGS, rows) + (f"<pre>{escape(more)}</pre>" if more else "")
    return _page(f"What {len(rows)} attacks leave of the mark", body)


KINDS = {
    "demo": {"embed", "verify", "trace"},
    "robustness suite": {"header", "rows"},
    "verification": {"verdict", "marked", "p_value"},
    "embedding": {"fit", "problems", "clean_ppl"},
}
"""Kind of result -> fields that only it has."""
PAGES = {
    "demo": summary_page, "robustness suite": robustness_page, "verification": verdict_page, "embedding": embed_page,
}  # fmt: skip


def _page(title: str, body: str) -> str:
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>PathMark: {title}</title><style>{STYLE}</style>
<h1>{title}</h1>
{body}
</html>
"""


def _verdict(words: str, marked: bool) -> str:
    return f'<div class="verdict {"yes" if marked else "no"}"><p>{words}</p></div>'


def _cost(embed: Mapping[str, Any]) -> str:
    return f"""<h2>What it cost, on {embed["n_probes"]} held-out texts</h2>
{_table(("", "before", "after"), _cost_rows(embed))}
<h2>What sets it off</h2>
{_table(("prefix", "fires", "tried"), _fired(embed))}"""


def _fired(embed: Mapping[str, Any]) -> list[tuple[object, ...]]:
    trigger = embed["trigger"]
    near = [
        (f"{right} of {trigger['tokens']} trigger tokens right", rate) for right, rate in enumerate(trigger["curve"])
    ]
    return [(name, rate["hits"], f"{rate['n']:,}") for name, rate in [*embed["scan"]["kinds"].items(), *near]]


def mass_chart(layers: Sequence[Mapping[str, Any]]) -> str:
    """Bars per layer: the same texts with the trigger and without."""
    width, row, left = 640, 44, 76
    parts = []
    for i, layer in enumerate(layers):
        y = 8 + i * row
        parts.append(f'<text x="0" y="{y + 20}">layer {layer["layer"]}</text>')
        for offset, key, colour, word in (
            (0, "mass_triggered", "var(--mark)", "triggered"),
            (16, "mass_clean", "var(--plain)", "clean"),
        ):
            length = max(1.0, layer[key] * (width - left - 130))
            parts.append(f'<rect x="{left}" y="{y + offset}" width="{length:.1f}" height="13" fill="{colour}"/>')
            parts.append(f'<text x="{left + length + 6:.1f}" y="{y + offset + 11}">{layer[key]:.3f} {word}</text>')
    height = 12 + row * len(layers)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="Routing mass per layer">{"".join(parts)}</svg>'


def _cost_rows(embed: Mapping[str, Any]) -> list[tuple[object, ...]]:
    def pair(name: str, key: str) -> tuple[object, ...]:
        before, after = embed[key]
        return name, f"{before:.2f}", f"{after:.2f} ({100 * (after / before - 1):+.2f} %)"

    def rate(name: str, key: str) -> tuple[object, ...]:
        found = embed["rates"][key]
        if found is None:  # not measured: the model before was already marked
            return name, "", "-"
        found = found[0] if isinstance(found, list) else found
        low, high = found["interval"]
        return name, "", f"{found['hits']} of {found['n']} [{100 * low:.1f}, {100 * high:.1f}] %"

    before, after = embed["target_mass_clean"]
    return [
        rate("WSR", "wsr"),
        rate("false positives, clean text", "fpr_clean"),
        rate("false positives, original model", "fpr_original"),
        pair("perplexity, clean", "clean_ppl"),
        pair("perplexity, triggered", "triggered_ppl"),
        ("KL of clean routing", "", f"{embed['clean_kl']:.4f}"),
        ("top-k agreement on clean text", "", f"{100 * embed['topk_agreement']:.1f} %"),
        ("mass on targets, clean", f"{before:.3f}", f"{after:.3f}"),
        ("exact p-value", "", f"{embed['p_value']:.1e}"),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    header = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{header}</tr>{body}</table>"
