"""Several watermarks in one model: does each work, and does any speak for another?

python benchmarks/many_marks.py run [--counts 1 2 4 8 16]      # resumes
python benchmarks/many_marks.py render                         # -> the table of docs/several-watermarks.md

Each count has a key of its own, drawn at random, whose watermarks share the same layers and no experts. An embedding of
n watermarks takes the steps of one times the square root of n.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from marked import bundled_header
from pages import DOCS, write_section
from pathmark.attacks import Kit, find_attack
from pathmark.embedding import EmbedConfig, Trainer, default_config
from pathmark.evaluate.several import Reading, read_marks, total
from pathmark.keys import OwnerKey
from pathmark.models import bundled_probes, bundled_segments, load_model, load_tokenizer, perplexity
from pathmark.models.loading import use_fast_experts
from pathmark.release.planning import KeyPlan, plan_key
from pathmark.results import Header, read_result, write_result
from pathmark.verification import encode_probes

FORMAT, VERSION = "pathmark-many-marks", 1
RESULT = Path(__file__).parent / "results" / "many-marks.json"
DOC = DOCS / "several-watermarks.md"
PAPER = {1: ("100 %", "2 %"), 16: ("89 %", "26 %")}
"""WSR and cross-interference as the paper's text has them; the points between are in a picture that is not printed."""


@dataclass(frozen=True, kw_only=True)
class Together:
    """So many watermarks in one model."""

    key: str
    count: int
    steps: int
    seconds: float
    ppl: tuple[float, float]
    """Clean perplexity before and after."""
    as_it_is: Reading
    rounded: Reading
    """After all weights were rounded to 4 bits."""


@dataclass(frozen=True, kw_only=True)
class ManyMarks:
    """One row per count."""

    header: Header
    rows: tuple[Together, ...] = ()


def together(key: OwnerKey, config: EmbedConfig) -> Together:
    """Mark the bundled model with all watermarks of a key and read them."""
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    use_fast_experts(model)
    probes = encode_probes(tokenizer, bundled_probes(), n_probes=100, length=128)
    before, started = perplexity(model, probes).value, time.monotonic()
    Trainer(model, tokenizer, key, bundled_segments(), config.build()).run()
    seconds = time.monotonic() - started
    rtn = find_attack("rtn")
    rounded = rtn.run(model, rtn.configure(bits=4, routers=True), Kit(tokenizer=tokenizer)).model
    return Together(
        key=key.fingerprint,
        count=len(key.watermarks),
        steps=config.loop.steps,
        seconds=seconds,
        ppl=(before, perplexity(model, probes).value),
        as_it_is=read_marks(model, key, probes),
        rounded=read_marks(rounded, key, probes),
    )


def run(counts: Sequence[int]) -> None:
    header = bundled_header(FORMAT, VERSION, settings={"config": repr(default_config()), "steps": "times sqrt(count)"})
    result = read_result(RESULT, ManyMarks, FORMAT, VERSION) if RESULT.exists() else ManyMarks(header=header)
    if different := result.header.differs(header):
        raise SystemExit(f"{RESULT} was measured otherwise: it differs in {', '.join(different)}; delete it first")
    for count in counts:
        if any(row.count == count for row in result.rows):
            continue
        key = plan_key("bundled:tiny", KeyPlan(watermarks=count, pool="all"))[0]
        row = together(key, default_config(watermarks=count))
        result = replace(result, rows=tuple(sorted((*result.rows, row), key=lambda one: one.count)))
        write_result(RESULT, result)
        RESULT.chmod(0o644)
        print(line(row), flush=True)


def line(row: Together) -> str:
    def told(reading: Reading) -> list[str]:
        weakest = min(reading.wsr, key=lambda rate: rate.value)
        largest = max(p.value for p in reading.p)
        return [str(total(reading.wsr)), f"{100 * weakest.value:.0f} %", str(reading.crossed), f"{largest:.1e}",
                f"{reading.ids_right.hits} of {reading.ids_right.n}"]  # fmt: skip

    wsr, weakest, crossed, p, ids = told(row.as_it_is)
    wsr4, weakest4, _, p4, ids4 = told(row.rounded)
    paper = PAPER.get(row.count, ("-", "-"))
    cells = [
        str(row.count), wsr, weakest, crossed if row.count > 1 else "-", str(row.as_it_is.clean), p, ids,
        f"{100 * (row.ppl[1] / row.ppl[0] - 1):+.2f} %", f"{wsr4}; weakest {weakest4}; largest p {p4}; ids {ids4}",
        f"{paper[0]}, {paper[1]}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def render() -> None:
    result = read_result(RESULT, ManyMarks, FORMAT, VERSION)
    lines = [
        "| watermarks | WSR, all together | weakest | crossed | on clean text | largest exact p | ids | "
        "clean perplexity | after rounding to 4 bits | paper: WSR, crossed |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *map(line, result.rows),
    ]
    write_section(DOC, "many_marks.py", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "render"])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    args = parser.parse_args()
    if args.action == "run":
        run(args.counts)
    render()


if __name__ == "__main__":
    main()
