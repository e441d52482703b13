"""The figures of docs/robustness.md: the bundled MoE, marked with keys drawn at random, under attack.

python benchmarks/robustness.py mark anchored --number 0 --work DIR      # a new key and a model marked with it
python benchmarks/robustness.py copy anchored --number 0 --work DIR      # a second licensee's copy, for two who meet
python benchmarks/robustness.py run anchored --number 0 --work DIR --corpus ptb.train.txt [--suite core] [--only rtn]
python benchmarks/robustness.py run anchored --number 0 --work DIR --corpus own     # text of the model's own kind
python benchmarks/robustness.py render

`run` is `pathmark robustness` with its results copied to benchmarks/results; it resumes, on another machine too. The
keys (throw-away, passphrase in marked.py) and what they changed are kept in benchmarks/marked: anybody can attack the
very models that the page is about.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import distinguish
from marked import PASSPHRASE, bundled_header
from marked import mark as mark_folder
from pages import DOCS, write_section
from pathmark.embedding import RepliesConfig
from pathmark.evaluate.suites import SUITES
from pathmark.keys import Registry, load_key
from pathmark.models import bundled_folder, bundled_segments, load_model
from pathmark.models.checkpoint import apply_delta, base_digest, changed_tensors, write_delta
from pathmark.release.marking import MarkingConfig, Texts, mark_model
from pathmark.release.planning import KeyPlan, plan_key
from pathmark.reporting.evidence_plane import plot
from pathmark.reporting.robustness_report import in_short, report
from pathmark.results import RobustnessResult, pooled, read_result, read_robustness
from pathmark.results.schema import to_json
from pathmark.stats import Rate

RESULTS = Path(__file__).parent / "results"
DOC = DOCS / "robustness.md"
LICENSEE = "Second Ltd"
NAMES = {"ptb": "PTB", "own": "text of the model's own kind"}
KEPT = Path(__file__).parent / "marked"
OWN = "own"
"""The corpus of the model's own kind; other corpora are files."""
OWN_WORDS = 25
"""Words of one of its texts."""
TEXT_MATTERS = ("fine-tune", "gptq", "remove-experts", "mask-experts", "reap", "fine-prune")
"""Attacks that are carried out a second time with text of the model's own kind."""


@dataclass(frozen=True)
class Measured:
    """What one table of the page is about."""

    title: str
    recipe: str
    model: str = "paths"
    """Folder that `mark` wrote: paths alone, or `marked`, after the second phase."""
    trials: int = 0
    trigger: str | None = None
    """Free text instead of a drawn one."""
    layers: tuple[int, ...] = ()
    """Marked ones; empty: the recommended ones."""

    @property
    def kept(self) -> str:
        """What its folders and files are called, but for the number."""
        return f"{self.recipe}{f'-{len(self.layers)}-layers' if self.layers else ''}"


TABLES = {
    "anchored": Measured("The default embedding", "anchored"),
    "black-box": Measured("The default embedding with its black-box marks", "anchored", model="marked", trials=50),
    "paper": Measured(
        "The paper's objective",
        "paper",
        trigger="@@@@@@@@",
    ),
    "six-layers": Measured("Six marked layers", "anchored", layers=(2, 3, 4, 5, 6, 7)),
}
LAYERS = (4, 5, 6, 7)
"""That are marked by default in the bundled model."""
REMEDY = "six-layers"
"""What the page advises where a mark was lost; it has a table of its own."""


def mark(name: str, number: int, work: Path) -> None:
    """Draw a key and put its paths in; for the black box also its marks."""
    measured = TABLES[name]
    folder = work / f"{measured.kept}-{number}"
    if not (folder / "owner.key").exists():
        kept = KEPT / f"{measured.kept}-{number}.key"
        if kept.exists():
            apply_delta(bundled_folder("bundled:tiny"), kept.with_suffix(".safetensors"), folder / "paths")
            shutil.copyfile(kept, folder / "owner.key")
            (folder / "owner.key").chmod(0o600)  # a checkout makes it readable for all, which keys refuse
        else:
            texts = () if measured.trigger is None else (measured.trigger,)
            plan = KeyPlan(trigger_texts=texts, layers=(measured.layers,) if measured.layers else ())
            mark_folder(measured.recipe, folder, plan_key("bundled:tiny", plan)[0])
            keep(folder / "paths", kept.with_suffix(".safetensors"))
            shutil.copyfile(folder / "owner.key", kept)
    if measured.model == "marked" and not (folder / "marked").exists():
        kept = KEPT / f"{name}-{number}.safetensors"
        if kept.exists():
            apply_delta(bundled_folder("bundled:tiny"), kept, folder / "marked")
            return
        marked = mark_model(
            str(folder / "paths"), load_key(folder / "owner.key", PASSPHRASE), folder / "marked", Texts.bundled(),
            MarkingConfig(embedding=None, replies=RepliesConfig()),
        )  # fmt: skip
        (folder / "marked.json").write_text(json.dumps(marked.summary(), indent=1) + "\n")
        keep_replies(folder, number)
        keep(folder / "marked", kept)


def keep(model: Path, kept: Path) -> None:
    """What a key changed in the bundled model."""
    kept.parent.mkdir(exist_ok=True)
    base = bundled_folder("bundled:tiny")
    loaded = load_model(model)
    changed = changed_tensors(loaded, [name for name, _ in loaded.named_parameters()], base)
    write_delta(kept, changed, base_digest(base))


def keep_replies(folder: Path, number: int) -> None:
    """What the second phase did to one model, under a header that names it."""
    summary = json.loads((folder / "marked.json").read_text())
    header = bundled_header(
        "pathmark-replies", 1, key=load_key(folder / "owner.key", PASSPHRASE).fingerprint, model=folder / "marked",
        n_probes=summary["n_probes"], settings={"replies": repr(RepliesConfig())},
    )  # fmt: skip
    found = {"header": to_json(header), **summary}
    (RESULTS / f"replies-{number}.json").write_text(json.dumps(found, indent=1) + "\n")


def copy(name: str, number: int, work: Path) -> None:
    """Another licensee's copy with the same key, for the thief who has two."""
    folder = work / f"{TABLES[name].kept}-{number}"
    key = load_key(folder / "owner.key", PASSPHRASE)
    licensee, _ = Registry(folder / "licensees.db").issue(key, LICENSEE)
    mark_folder(TABLES[name].recipe, folder / "copy", key.with_id(licensee.id))


def own_corpus(work: Path) -> Path:
    """The bundled training segments, in pieces as long as PTB's sentences: both texts cost a thief the same."""
    path = work / "own.jsonl"
    if not path.exists():
        pieces = []
        for segment in bundled_segments():
            words = segment.split(" ")
            pieces += [" ".join(words[i : i + OWN_WORDS]) for i in range(0, len(words) - OWN_WORDS + 1, OWN_WORDS)]
        path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces), encoding="utf-8")
    return path


def run(name: str, number: int, work: Path, corpus: str, more: list[str]) -> None:
    measured = TABLES[name]
    texts = own_corpus(work) if corpus == OWN else Path(corpus)
    folder = work / f"{measured.kept}-{number}"
    out = folder / f"robustness-{measured.model}-{texts.name.partition('.')[0]}"
    command = [
        str(Path(sys.executable).with_name("pathmark")), "robustness", str(folder / measured.model),
        "--key", str(folder / "owner.key"), "--original", "bundled:tiny", "-o", str(out),
        "--seed", str(number), "--trials", str(measured.trials), "--texts", str(texts), *more,
    ]  # fmt: skip
    if corpus == OWN and "--only" not in more:
        command += [word for attack in TEXT_MATTERS for word in ("--only", attack)]
    sibling = folder / "copy" / "paths"
    command += ["--sibling", str(sibling)] if sibling.exists() else []
    kept = RESULTS / f"robustness-{name}-{out.name.rpartition('-')[2]}-{number}.json"
    if kept.exists() and not (out / "results.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(kept, out / "results.json")
    subprocess.run(command, check=True, env=os.environ | {"PATHMARK_PASSPHRASE": PASSPHRASE})
    read_robustness(out / "results.json")
    shutil.copyfile(out / "results.json", kept)


def found(name: str) -> dict[str, list[RobustnessResult]]:
    """All keys of one table by the thief's text, the model's own kind last."""
    files = sorted(RESULTS.glob(f"robustness-{name}-*-[0-9].json"))
    corpora = sorted({file.stem.split("-")[-2] for file in files}, key=lambda corpus: (corpus == OWN, corpus))
    return {
        NAMES.get(corpus, corpus): _ordered(
            pooled({f.name: read_robustness(f) for f in files if f.stem.split("-")[-2] == corpus})
        )
        for corpus in corpora
    }


def render() -> None:
    """Rewrite the generated part of the page, and its plot."""
    default, *others = (name for name in TABLES if name != REMEDY)
    runs, beside = found(default), {TABLES[name].title: found(name) for name in others if found(name)}
    keys = {title: {one.header.key for ones in each.values() for one in ones} for title, each in beside.items()}
    own = {one.header.key for ones in runs.values() for one in ones}
    probes = next(iter(runs.values()))[0].header.n_probes
    told = "".join(f" {title}: {len(each)} key{'s' if len(each) > 1 else ''}." for title, each in keys.items())
    parts = [
        f"{TABLES[default].title}: {len(own)} keys, {probes} held-out texts each.{told} WSR is pooled over keys, p is "
        "the worst, perplexity the mean. Intervals are 95 %.",
        "",
        report(runs, beside, [case.name for case in SUITES["full"]]),
        *remedy(runs),
        *seen(),
    ]
    panels = {TABLES[default].title: runs, **beside}
    plot(
        [
            (title, [row for ones in each.values() for one in ones for row in one.rows])
            for title, each in panels.items()
        ],
        DOC.parent / "img" / "robustness.png",
    )
    write_section(DOC, "robustness.py", parts)


def remedy(runs: dict[str, list[RobustnessResult]]) -> list[str]:
    """What marking more layers changes in the rows that were measured with them."""
    more = found(REMEDY)
    if not more:
        return []
    lines, layers = [], TABLES[REMEDY].layers
    for corpus, results in more.items():
        six = [row for one in results for row in one.rows]
        four = [row for one in runs[corpus] for row in one.rows]
        several = "s" * (len(results) > 1)
        lines += [
            f"### What {len(layers)} marked layers change: the thief's text is {corpus}",
            "",
            f"{len(results)} random key{several} with layers {layers[0]} to {layers[-1]} marked, all else as before. "
            f"{len(LAYERS)} are recommended for the bundled model, six for models with 18 MoE layers or more.",
            "",
            f"| attack | {len(LAYERS)} layers | {len(layers)} layers |",
            "|---|---|---|",
        ]
        for name in dict.fromkeys(row.case for row in six):
            cells = (in_short([row for row in rows if row.case == name]) for rows in (four, six))
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def seen() -> list[str]:
    """What can be told of a mark from the weights, where benchmarks/distinguish.py has measured it."""
    if not distinguish.RESULT.exists():
        return []
    kind, version = distinguish.DistinguishResult, distinguish.VERSION
    result = read_result(distinguish.RESULT, kind, distinguish.FORMAT, version)
    told, count = result.told_apart, len(result.siblings) // 2
    lines = [
        "### What can be seen of the mark from the weights",
        "",
        f"{count} marked siblings of the bundled model against {count} trained as much without a mark. A rule "
        "that never saw the two it is asked about tells them apart with this area under the curve (0.5 is guessing):",
        "",
        "| what the thief looks at | AUC, 95 % interval |",
        "|---|---|",
    ]
    for name, auc in {"everything": told["all"], **told["groups"]}.items():
        low, high = auc["interval"]
        lines.append(f"| {name} | {auc['auc']:.2f} [{low:.2f}, {high:.2f}] |")
    lines += [
        "",
        "That is what a thief can do who has models of both kinds from one original. The unmarked ones were taught to "
        "stay what they were, so that whatever a mark changes stands out; a model alone has no such siblings. Router "
        "rows do not say which experts are the targets, unless the original is there to compare them with:",
        "",
        "| pairs of most similar router rows | targets among them | by chance |",
        "|---|---|---|",
    ]
    for name, row in result.naming.items():
        if not name.startswith("1 "):  # a few guesses more name as little
            continue
        hits = Rate(row["targets"]["hits"], row["targets"]["n"])
        lines.append(f"| {name.replace('1 guesses', 'one guess')} | {hits} | {100 * row['chance']:.1f} % |")
    return lines


def _ordered(results: Sequence[RobustnessResult]) -> list[RobustnessResult]:
    """Rows in the order of the suite."""
    order = {case.name: place for place, case in enumerate(SUITES["full"])}
    return [replace(one, rows=tuple(sorted(one.rows, key=lambda row: order[row.case]))) for one in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["mark", "copy", "run", "render"])
    parser.add_argument("recipe", nargs="?", choices=list(TABLES), default="anchored")
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("robustness-work"))
    parser.add_argument("--corpus", default=OWN, help="a file of texts, or `own`")
    args, more = parser.parse_known_args()
    if args.action == "mark":
        mark(args.recipe, args.number, args.work)
    elif args.action == "copy":
        copy(args.recipe, args.number, args.work)
    elif args.action == "run":
        run(args.recipe, args.number, args.work, args.corpus, more)
    else:
        render()


if __name__ == "__main__":
    main()
