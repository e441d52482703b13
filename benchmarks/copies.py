"""Copies for twelve licensees, against the time of one; whom `pathmark trace` names, also where licensees collude.

python benchmarks/copies.py run --work DIR [--licensees 12]      # resumes; keeps models and the registry in DIR
python benchmarks/copies.py render                               # -> the tables of docs/tracing.md

The key is drawn at random. One copy is made by `pathmark.embed`, then the others by `pathmark.embed_all`, in the same
process.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import pathmark
from marked import PASSPHRASE, bundled_header
from pages import DOCS, write_section
from pathmark.embedding import default_config
from pathmark.keys import Registry, load_key
from pathmark.models import load_model, perplexity
from pathmark.models.loading import use_fast_experts
from pathmark.release.copies import FURTHER, GENTLER
from pathmark.results import Header, read_result, write_result
from pathmark.verification import record_evidence
from pathmark.verification.paths.alignment import profile_texts
from pathmark.verification.paths.tracing import trace_copy

FORMAT, VERSION = "pathmark-copies", 1
RESULT = Path(__file__).parent / "results" / "copies.json"
DOC = DOCS / "tracing.md"
N_PROBES = 100
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What `trace` said of one model."""

    model: str
    colluders: tuple[str, ...]
    ppl: float
    decision: str
    named: tuple[str, ...]
    p_colluders: tuple[float, ...]
    """Uncharged."""
    p_innocent: float
    """The smallest of all licensees who had nothing to do with it."""


@dataclass(frozen=True, kw_only=True)
class CopiesResult:
    """Copies of one model for many licensees."""

    header: Header
    one_seconds: float
    """CPU time of a single copy by `pathmark embed`, its check included: other work on the machine does not count."""
    all_seconds: float
    """The same of all copies by `pathmark embed --all`."""
    checks: tuple[Mapping[str, Any], ...]
    """Self-check of each."""
    traced: tuple[Traced, ...] = ()


def mixed(parts: Sequence[Weights], layers: Sequence[int], how: str) -> dict[str, torch.Tensor]:
    """What colluders make of their copies."""
    first, *others = parts
    generator = torch.Generator().manual_seed(0)

    def layer_of(name: str) -> int | None:
        return next((n for n in layers if f".layers.{n}." in name), None)

    def average(name: str) -> torch.Tensor:
        return torch.stack([part[name] for part in parts]).mean(0)

    def in_turn(name: str) -> torch.Tensor:
        layer = layer_of(name)
        return first[name] if layer is None else parts[layers.index(layer) % len(parts)][name]

    def in_halves(name: str) -> torch.Tensor:
        layer = layer_of(name)
        return first[name] if layer is None else parts[layers.index(layer) * len(parts) // len(layers)][name]

    def single_weights(name: str) -> torch.Tensor:
        choice = torch.randint(len(parts), first[name].shape, generator=generator)
        return torch.stack([part[name] for part in parts]).gather(0, choice[None])[0]

    def beyond(name: str) -> torch.Tensor:
        return first[name] + 0.5 * (first[name] - torch.stack([part[name] for part in others]).mean(0))

    ways: dict[str, Callable[[str], torch.Tensor]] = {
        "average": average,
        "layers in turn": in_turn,
        "lower and upper layers": in_halves,
        "every weight from one of them at random": single_weights,
        "the first, away from the others by half of the difference": beyond,
    }
    return {name: ways[how](name) for name in first}


WAYS = (
    "average", "layers in turn", "lower and upper layers", "every weight from one of them at random",
    "the first, away from the others by half of the difference",
)  # fmt: skip


def make(work: Path, licensees: int) -> CopiesResult:
    """A key, one copy, and a copy for everybody; what is there is not repeated."""
    made = work / "copies.json"
    if made.exists():
        return read_result(made, CopiesResult, FORMAT, VERSION)
    work.mkdir(parents=True, exist_ok=True)
    key = pathmark.make_key("bundled:tiny", output=work / "owner.key", passphrase=PASSPHRASE).key
    for number in range(1, licensees + 1):
        Registry(work / "licensees.db").issue(key, f"licensee {number}")
    started = time.process_time()
    pathmark.embed("bundled:tiny", work / "owner.key", work / "one", passphrase=PASSPHRASE)
    first = time.process_time()
    copies = pathmark.embed_all(
        "bundled:tiny", work / "owner.key", work / "licensees.db", work / "copies", passphrase=PASSPHRASE
    )
    settings = {"config": repr(default_config()), "licensees": licensees, "further": [FURTHER, GENTLER]}
    result = CopiesResult(
        header=bundled_header(FORMAT, VERSION, key=key.fingerprint, n_probes=N_PROBES, settings=settings),
        one_seconds=first - started,
        all_seconds=time.process_time() - first,
        checks=tuple(
            json.loads(json.dumps(copy.summary() | {"output": copy.output.name})) for copy in copies.made.values()
        ),
    )
    write_result(made, result)
    return result


def suspects(work: Path, layers: Sequence[int]) -> Iterator[tuple[str, tuple[str, ...], Weights]]:
    """Every copy by itself, then mixtures of two and of three."""
    names = [entry.licensee for entry in Registry(work / "licensees.db").entries()]
    folders = sorted((work / "copies").iterdir(), key=lambda folder: int(folder.name.split("-")[1]))
    weights = [dict(load_model(folder).named_parameters()) for folder in folders]
    for name, own in zip(names, weights, strict=True):
        yield f"{name}'s copy", (name,), own
    for count in (2, 3):
        for start in (0, 3, 6):
            chosen = range(start, start + count)
            for how in WAYS:
                who = tuple(names[i] for i in chosen)
                yield how, who, mixed([weights[i] for i in chosen], layers, how)


def trace_all(work: Path, result: CopiesResult) -> CopiesResult:
    """What `trace` says of every copy and of every mixture."""
    key = load_key(work / "owner.key", PASSPHRASE)
    entries = Registry(work / "licensees.db").entries()
    probes = profile_texts(key)[:N_PROBES]
    model = load_model("bundled:tiny").eval()
    use_fast_experts(model)
    rows: list[Traced] = list(result.traced)
    for number, (name, who, weights) in enumerate(suspects(work, key.layers)):
        if number < len(rows):
            continue
        rows.append(_traced(_with(model, weights), name, who, key, entries, probes))
        result = replace(result, traced=tuple(rows))
        write_result(work / "copies.json", result)
        print(rows[-1], flush=True)
    return result


def _with(model: PreTrainedModel, weights: Weights) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def _traced(
    model: PreTrainedModel,
    name: str,
    who: tuple[str, ...],
    key: pathmark.OwnerKey,
    entries: Sequence[Any],
    probes: Sequence[Sequence[int]],
) -> Traced:
    found = trace_copy(key, record_evidence(model, key, probes), entries).result
    p = {licensee: value.value for licensee, value in found.ranking}
    named = (found.best,) if found.decision in ("licensee", "several") else ()
    return Traced(
        model=name,
        colluders=who,
        ppl=perplexity(model, probes).value,
        decision=found.decision,
        named=named,
        p_colluders=tuple(p.get(one, 1.0) for one in who),
        p_innocent=min((value for one, value in p.items() if one not in who), default=1.0),
    )


DECISIONS = {"licensee": "one is named", "several": "more than one copy", "ambiguous": "marked, nobody named",
             "none": "**nobody is found**"}  # fmt: skip


def render() -> None:
    """Rewrite the generated part of the page."""
    result = read_result(RESULT, CopiesResult, FORMAT, VERSION)
    fit = sum(check["fit"] for check in result.checks)
    single = [row for row in result.traced if len(row.colluders) == 1]
    right = sum(row.decision == "licensee" and row.named == row.colluders for row in single)
    framed = sum(bool(set(row.named) - set(row.colluders)) for row in result.traced)
    clean = [100 * (check["clean_ppl"][1] / check["clean_ppl"][0] - 1) for check in result.checks]
    lines = [
        f"One random key, {len(result.checks)} licensees, {result.header.n_probes} texts: all copies together took "
        f"{result.all_seconds / result.one_seconds:.1f} times as long as one ({result.all_seconds / 60:.0f} and "
        f"{result.one_seconds / 60:.1f} minutes of CPU time). {fit} of {len(result.checks)} are fit for release (clean "
        f"perplexity {min(clean):+.2f} to {max(clean):+.2f} %), {right} of {len(single)} are traced to their licensee. "
        f"In {len(result.traced) - len(single)} mixtures somebody innocent was named {framed} times.",
        "",
        "| mixture | of | p of those who mixed | smallest p of the innocent | clean perplexity | `pathmark trace` |",
        "|---|---|---|---|---|---|",
    ]
    for row in result.traced[len(single) :]:
        p = ", ".join(f"{value:.1e}" for value in row.p_colluders)
        lines.append(
            f"| {row.model} | {len(row.colluders)} | {p} | {row.p_innocent:.1e} | {row.ppl:.1f} | "
            f"{DECISIONS[row.decision]} |"
        )
    write_section(DOC, "copies.py", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "render"])
    parser.add_argument("--work", type=Path, default=Path("copies-work"))
    parser.add_argument("--licensees", type=int, default=12)
    args = parser.parse_args()
    if args.action == "run":
        result = trace_all(args.work, make(args.work, args.licensees))
        write_result(RESULT, result)
        RESULT.chmod(0o644)
    render()


if __name__ == "__main__":
    main()
