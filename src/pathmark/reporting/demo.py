"""The page of `pathmark demo`: four models, whose copy leaked, where its tokens went, what the mark cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pathmark.reporting.embedding import embedding_sections
from pathmark.reporting.layout import Cell, Page, Section, Table, Verdict, row
from pathmark.reporting.verification import TITLES, TONES, routing_sections
from pathmark.results.evidence import MeasuredWatermark
from pathmark.results.schema import from_json

STOLEN = "stolen, disguised"
"""The model whose routing is shown."""


def demo_page(results: Mapping[str, Any]) -> Page:
    """The page of the results.json that the demo leaves."""
    embed, verify, traced = results["embed"], results["verify"], results["trace"]
    fit = "fit" if embed["fit"] else "not fit"
    stolen = from_json(MeasuredWatermark, results["stolen"], "stolen")
    return Page(
        kind="demo",
        title=f"A marked copy of {results['model']}: {fit} for release",
        subtitle=f"{results['architecture']}, marked with id {results['id']} in the layers "
        f"{', '.join(map(str, results['layers']))}. The key can tell {results['id_capacity']:,} copies apart.",
        verdicts=[
            Verdict(TONES[verify[STOLEN]["verdict"]], results["words"][STOLEN]),
            Verdict("undecided", traced["words"]),
        ],
        sections=[
            Section(
                name="models",
                title="Four models, examined with the same key",
                tables=[_models(verify)],
            ),
            *routing_sections(stolen),
            *embedding_sections(embed),
        ],
    )  # fmt: skip


def _models(verify: Mapping[str, Any]) -> Table:
    rows = [
        row(
            name, Cell(TITLES[found["verdict"]].lower(), tone="good" if TONES[found["verdict"]] == "yes" else ""),
            f"{found['p_value']:.1e}", f"{100 * found['wsr']:.0f} %",
            found["id"] if found["id"] is not None and found["marked"] else "-",
        )
        for name, found in verify.items()
    ]  # fmt: skip
    return Table(
        "The four models",
        ("model", "our mark", "chance of that by accident", "texts that take the path", "id read"),
        rows,
    )
