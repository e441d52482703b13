"""`pathmark robustness`: a table of attacks before the release."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import click

from pathmark.cli._keys import echo_json, json_option, open_key
from pathmark.errors import AttackError

EXAMPLES = """\b
Examples:
  pathmark robustness marked --key owner.key --base bundled:tiny -o robustness --hours 2
  pathmark robustness marked --key owner.key --base bundled:tiny --sibling marked-for-alpha -o robustness
  pathmark robustness marked --key owner.key -o robustness --suite paper
  pathmark robustness marked --key owner.key -o robustness --only gptq --only fine-prune
  pathmark robustness marked --key owner.key --corpus thief.txt --trials 25 -o robustness --json
"""


@click.command(epilog=EXAMPLES)
@click.argument("model")
@click.option("--key", "key_file", required=True, type=click.Path(path_type=Path), help="Key that marked MODEL.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for results; resumes.")
@click.option(
    "--suite", type=click.Choice(["core", "paper", "full"]), default="full", show_default=True,
    help="What a mark is meant to survive, the paper's attacks, or also what a thief would do besides.",
)  # fmt: skip
@click.option("--only", multiple=True, metavar="ATTACK", help="Only these attacks of the suite; may be repeated.")
@click.option("--skip", multiple=True, metavar="ATTACK", help="All but these; also search and forgery.")
@click.option("--hours", type=float, help="Time budget. Rows that would exceed it are listed as not run.")
@click.option("--base", help="The unmarked original, for attacks that compare with it.")
@click.option("--sibling", help="Another licensee's copy, for a thief who has two.")
@click.option("--corpus", type=click.Path(path_type=Path), help="The thief's text. Default: bundled.")
@click.option(
    "--n-probes", type=click.IntRange(4), default=100, show_default=True, help="The key's texts to measure on."
)
@click.option("--trials", type=click.IntRange(0), default=0, show_default=True, help="Black-box trials per attack.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the attacks; another seed adds rows.")
@click.option("--trust-remote-code", is_flag=True, help="Run the model folder's own Python code.")
@json_option
def command(model: str, key_file: Path, output: Path, as_json: bool, **options: Any) -> None:
    """Carry out a suite of attacks on a marked model and measure what is left of the mark.

    Per attack and strength: WSR, exact p-value, the id, black-box replies, and the perplexity on clean text, which
    is what the thief pays. OUT gets results.json, table.md and evidence.png. A run that was stopped goes on where
    it was. Attacks that win stand in the table as such; exit code 0 says only that everything was measured.
    """
    from importlib.metadata import version

    from pathmark.attacks.kit import Kit
    from pathmark.cli._progress import Bar
    from pathmark.evaluate.robustness import RobustnessConfig, Suspects, run_adversaries, run_suite
    from pathmark.models import bundled_segments, load_model, load_tokenizer
    from pathmark.models.checkpoint import base_digest
    from pathmark.models.describe import describe_model
    from pathmark.models.loading import local_folder, use_fast_experts
    from pathmark.models.texts import read_texts
    from pathmark.reporting.robustness import adversaries, plot, table
    from pathmark.training import keep_freed_memory

    keep_freed_memory()
    key, corpus, trusted = open_key(key_file), options["corpus"], options["trust_remote_code"]
    cases = _chosen(options)
    texts = read_texts(corpus) if corpus is not None else bundled_segments()
    config = RobustnessConfig(
        n_probes=options["n_probes"], trials=options["trials"], seed=options["seed"], hours=options["hours"]
    )
    with Bar(quiet=as_json) as bar:
        bar.stage("loading", None)
        suspect = load_model(model, trust_remote_code=trusted)
        use_fast_experts(suspect)
        base, sibling = (
            None if source is None else load_model(source, trust_remote_code=trusted)
            for source in (options["base"], options["sibling"])
        )
        if base is not None:
            use_fast_experts(base)
        first = key.watermarks[0]
        kit = Kit(
            tokenizer=load_tokenizer(model, trust_remote_code=trusted),
            texts=texts,
            base=base,
            sibling=sibling,
            layers=sorted({layer for mark in key.watermarks for layer in mark.layers}),
            targets={layer: first.targets(layer) for layer in first.layers},
            progress=bar,
        )
        facts = {
            "version": version("pathmark"),
            "model": base_digest(local_folder(model))[:16],
            "corpus": "bundled" if corpus is None else corpus.name,
            "corpus_sha256": sha256("\n".join(texts).encode()).hexdigest(),
            "texts": len(texts),
        }
        suspects = Suspects(suspect, key, kit, config)
        results = run_suite(suspects, cases, output, facts=facts, progress=bar)
        if options["suite"] != "paper" and not options["only"]:
            described, codec, _ = describe_model(model, trust_remote_code=trusted)
            results = run_adversaries(suspects, output, described, codec, skip=options["skip"], progress=bar)
    (output / "table.md").write_text(table(results["rows"]) + adversaries(results), encoding="utf-8")
    plot([("", results["rows"])], output / "evidence.png")
    if as_json:
        echo_json(results)
    else:
        _render(results["rows"], output)
        click.echo(adversaries(results), nl=False)
    sys.exit(0)


def _chosen(options: dict[str, Any]) -> list[Any]:
    from pathmark.attacks.catalog import find_attack
    from pathmark.evaluate.suites import SUITES

    for name in (*options["only"], *options["skip"]):
        if name not in ("search", "forgery"):
            find_attack(name)
    suite = SUITES[options["suite"]]
    used = [{name for name, _ in case.steps} for case in suite]
    only, skip = set(options["only"]), set(options["skip"])
    cases = [
        case for case, names in zip(suite, used, strict=True)
        if not names & skip and (not only or not names or names & only)
    ]  # fmt: skip
    if len(cases) < 2:
        raise AttackError(f"no attack of the {options['suite']} suite is left by --only and --skip")
    return cases


def _render(rows: list[dict[str, Any]], output: Path) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from pathmark.reporting.robustness import HEADINGS, cells

    shown = Table(box=None, header_style="bold")
    for heading in HEADINGS:
        shown.add_column(heading)
    for row in rows:
        if row["status"] == "measured":
            *figures, verdict = cells([row])
            lost = not row["marked"]
            shown.add_row(row["case"], *figures, "[bold red]not found[/]" if lost else verdict)
        else:
            shown.add_row(row["case"], *[""] * (len(HEADINGS) - 2), f"{row['status']}: {escape(row['reason'])}")
    console = Console(soft_wrap=True)
    console.print(shown)
    measured = [row for row in rows if row["status"] == "measured"]
    console.print(
        f"{sum(row['marked'] for row in measured)} of {len(measured)} measured attacks leave the mark provable at "
        f"1e-6. Results: {output / 'results.json'}, {output / 'table.md'}, {output / 'evidence.png'}"
    )
