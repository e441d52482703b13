"""Other schemes on the bundled model: what each finds in a marked model and in the original, and what it costs.

python benchmarks/schemes.py eaaw ifmark,lr=3e-4 learnmark,lr=0.003,steps=150     # adds rows to the result
python benchmarks/schemes.py                                                      # only writes the page's tables

A row is one secret with the settings that stand behind the scheme's name; without any it has the defaults. Marked
weights are rounded to bfloat16, as the bundled model is stored.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from marked import bundled_header
from pathmark.baselines import SchemeVerdict, configure, find_scheme
from pathmark.baselines.tuning import TrainedConfig
from pathmark.keys.schemekey import SchemeKey
from pathmark.models import bundled_probes, bundled_segments, load_model, load_tokenizer, perplexity
from pathmark.models.loading import use_fast_experts
from pathmark.results import Header, read_result, write_result
from pathmark.stats import Rate
from pathmark.training import keep_freed_memory

FORMAT, VERSION = "pathmark-schemes", 1
RESULT = Path(__file__).parent / "results" / "schemes.json"
PAGE = Path(__file__).parent.parent / "docs" / "baselines.md"
N_PROBES, TOKENS = 100, 128


@dataclass(frozen=True, kw_only=True)
class Found:
    """A scheme's verdict."""

    wsr: Rate
    log10_p: float
    marked: bool
    figures: Mapping[str, float]

    @classmethod
    def of(cls, verdict: SchemeVerdict) -> Found:
        return cls(wsr=verdict.wsr, log10_p=verdict.p.log10, marked=verdict.marked, figures=dict(verdict.figures))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One secret put into the bundled model."""

    scheme: str
    settings: Mapping[str, Any]
    """Those that were given; the others are the defaults of that day."""
    rate: float | None
    steps: int | None
    counted: str
    marked: Found
    original: Found
    ppl_before: float
    ppl: float
    seconds: float
    """Of embedding, on a machine that did other things too."""


@dataclass(frozen=True, kw_only=True)
class SchemesResult:
    """All rows."""

    header: Header
    rows: tuple[Row, ...]


def measure(name: str, settings: Mapping[str, Any]) -> Row:
    """Embed, round, and look for the mark in the marked model and in the original."""
    secret = hashlib.sha256(f"{name} 0".encode()).digest()
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    use_fast_experts(model)
    key = SchemeKey(scheme=name, settings={"vocabulary": model.config.vocab_size, **settings}, secret=secret)
    scheme, probes = find_scheme(name), bundled_probes()
    config = configure(scheme, key)
    started = time.monotonic()
    marked = scheme.embed(model, tokenizer, config, bundled_segments())
    seconds = time.monotonic() - started
    if scheme.in_weights:
        marked = marked.to(torch.bfloat16).float()
    found, absent = (scheme.verify(each, tokenizer, config, probes) for each in (marked, model))
    rows = [tokenizer(text)["input_ids"][:TOKENS] for text in probes[:N_PROBES]]
    rate = config.rate(model) if isinstance(config, TrainedConfig) else None
    return Row(
        scheme=name, settings=dict(settings), rate=rate, steps=getattr(config, "steps", None), counted=found.counted,
        marked=Found.of(found), original=Found.of(absent), ppl_before=perplexity(model, rows).value,
        ppl=perplexity(marked, rows).value, seconds=seconds,
    )  # fmt: skip


def figures(rows: Sequence[Row]) -> str:
    """The defaults, a line per scheme."""
    lines = [
        "| scheme | WSR, marked model | WSR, original | p, marked | p, original | perplexity |",
        "|---|" + "---|" * 5,
    ]
    for row in rows:
        if not row.settings:
            p = [f"{10**found.log10_p:.1e}" for found in (row.marked, row.original)]
            change = f"{row.ppl:.1f} ({100 * (row.ppl / row.ppl_before - 1):+.1f} %)"
            lines.append(f"| {row.scheme} | {row.marked.wsr} | {row.original.wsr} | {p[0]} | {p[1]} | {change} |")
    return "\n".join(lines)


def sweep(rows: Sequence[Row]) -> str:
    """Every rate that was tried."""
    lines = ["| scheme | settings | rate | steps | WSR | green share | perplexity |", "|---|" + "---|" * 6]
    for row in sorted((row for row in rows if row.rate is not None), key=lambda row: (row.scheme, row.rate, row.steps)):
        given = ", ".join(f"{k} {v}" for k, v in row.settings.items() if k not in ("lr", "steps")) or "-"
        green = row.marked.figures.get("green_share", math.nan)
        shown = "-" if math.isnan(green) else f"{green:.3f}"
        change = f"{100 * (row.ppl / row.ppl_before - 1):+.1f} %"
        lines.append(f"| {row.scheme} | {given} | {row.rate:g} | {row.steps} | {row.marked.wsr} | {shown} | {change} |")
    return "\n".join(lines)


def page(text: str, rows: Sequence[Row]) -> str:
    """The page with its tables."""
    for name, table in (("figures", figures(rows)), ("sweep", sweep(rows))):
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        text = f"{before}{begin}{table}\n{end}{after}"
    return text


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """`ifmark,lr=3e-4` as a name and settings."""
    name, *given = text.split(",")
    return name, {key: json.loads(value) for key, value in (one.split("=") for one in given)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemes", nargs="*")
    keep_freed_memory()
    for text in parser.parse_args().schemes:
        row = measure(*parse(text))
        header = bundled_header(FORMAT, VERSION, n_probes=N_PROBES, settings={"tokens": TOKENS})
        result = read_result(RESULT, SchemesResult, FORMAT, VERSION) if RESULT.exists() else None
        kept = () if result is None else result.rows
        kept = tuple(old for old in kept if (old.scheme, old.settings) != (row.scheme, row.settings))
        write_result(RESULT, replace(result or SchemesResult(header=header, rows=()), rows=(*kept, row)))
        RESULT.chmod(0o644)
        print(row, flush=True)
    rows = read_result(RESULT, SchemesResult, FORMAT, VERSION).rows
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
