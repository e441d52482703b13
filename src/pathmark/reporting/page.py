"""A summary page from results: one HTML file, no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

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


def summary_page(results: Mapping[str, Any]) -> str:
    """The page of `pathmark demo`: what went in, what it cost, what verification says."""
    embed, verify = results["embed"], results["verify"]
    verdicts = "".join(
        f'<div class="verdict {"yes" if verify[name]["marked"] else "no"}"><p><b>{escape(name.capitalize())}.'
        f"</b> {escape(results['words'][name])}</p></div>"
        for name in verify
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>PathMark: {escape(results["model"])}</title><style>{STYLE}</style>
<h1>{escape(results["model"])}, marked with id {results["id"]}: {"fit" if embed["fit"] else "not fit"} for release</h1>
<p>{escape(results["architecture"])}; layers {", ".join(map(str, results["layers"]))};
{results["id_capacity"]:,} ids; {results["evidence_bits"]:.1f} bits of evidence.</p>
{verdicts}
<h2>Whose copy leaked</h2>
<p>{escape(results["trace"]["words"])}</p>
<h2>Routing mass on the target experts</h2>
{mass_chart(next(iter(verify.values()))["layers"])}
<h2>What it cost, on {embed["n_probes"]} held-out texts</h2>
{_table(("", "before", "after"), _cost_rows(embed))}
<h2>What sets it off</h2>
{_table(("prefix", "fires", "tried"), _fired(embed))}
</html>
"""


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
