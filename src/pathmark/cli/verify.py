"""`pathmark verify`: is a key's mark in this model, behind this API, in these routes?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pathmark.cli import _blackbox
from pathmark.cli._keys import echo_json, json_option, open_key
from pathmark.errors import VerificationError

if TYPE_CHECKING:
    from pathmark.keys import OwnerKey
    from pathmark.verification import Anchor, Examined, PathVerdict

EXAMPLES = """\b
Examples:
  pathmark verify ./suspect --key owner.key
  pathmark verify ./suspect --key owner.key --commitment owner.commitment.json --suspect-published 2026-09-01 --strict
  pathmark verify ./adapter --base ./Qwen1.5-MoE-A2.7B --key owner.key --log case-17
  pathmark verify ./pruned-copy --key owner.key --graft ./our-unmarked-original
  pathmark verify ./DeepSeek-V3-clone --key owner.key --stream always --n-probes 20 --json
  pathmark verify --routes recorded.jsonl --key owner.key
  pathmark verify --api https://api.example.com/v1 --api-model their-name --api-key-env API_KEY --key owner.key
  pathmark verify ./suspect --black-box --key owner.key
"""


@click.command(epilog=EXAMPLES)
@click.argument("model", required=False)
@click.option("--key", "key_file", required=True, type=click.Path(path_type=Path), help="Key made by keygen.")
@click.option("--routes", type=click.Path(path_type=Path), help="Recorded routes instead of a model (docs/routes.md).")
@click.option("--base", help="Base model of a peft adapter, if its config does not name the right one.")
@click.option("--commitment", type=click.Path(path_type=Path), help="Published commitment of the key.")
@click.option(
    "--suspect-published", type=click.DateTime(["%Y-%m-%d"]),
    help="Day on which the suspect, or its first ancestor, was published.",
)  # fmt: skip
@click.option("--strict", is_flag=True, help="Let the third party's p-value decide, not the owner's.")
@click.option("--probes", type=click.Path(path_type=Path), help="Texts to probe with. Default: those in the key.")
@click.option("--n-probes", type=click.IntRange(1), default=100, show_default=True, help="Texts to probe with.")
@click.option("--tokens", type=click.IntRange(4), default=128, show_default=True, help="Length of --probes texts.")
@click.option("--gamma", type=float, default=0.8, show_default=True, help="Threshold of the paper's WSR.")
@click.option("--significance", type=float, default=1e-6, show_default=True, help="Level of the exact test.")
@click.option("--decoys", type=click.IntRange(0, 64), default=3, show_default=True, help="Control triggers.")
@click.option("--suspects", type=click.IntRange(1), default=1, show_default=True, help="Models examined in this case.")
@click.option("--keys", type=click.IntRange(1), default=1, show_default=True, help="Keys held against this suspect.")
@click.option("--reference", help="Owner's own release or original: match experts to it instead of the key's profiles.")
@click.option("--graft", help="Unmarked original: also read the suspect's marked layers fed by its lower layers.")
@click.option("--no-align", is_flag=True, help="Take experts by their numbers, without matching.")
@click.option(
    "--stream", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
    help="Read the weights layer by layer; auto: when they need more than half of the free memory.",
)  # fmt: skip
@click.option(
    "--log", "log_folder", type=click.Path(path_type=Path),
    help="Keep raw results and digests in this new folder; with --api or --black-box every exchange in this file.",
)  # fmt: skip
@click.option("--obtained", help="How the suspect was obtained, for the log. Asked for in a terminal.")
@click.option("--trust-remote-code", is_flag=True, help="Run the suspect's own Python code.")
@_blackbox.options
@json_option
def command(model: str | None, key_file: Path, as_json: bool, **options: Any) -> None:
    """Test whether a key's mark is in a model: from its weights, from recorded routes, or through an API.

    From weights and routes, experts are matched to the original's first, blind to the secret; then an exact test
    compares what the trigger does to the secret path with what it does to every other path. A suspect that was
    damaged (pruned, squeezed, fine-tuned) may have lost the trigger on its way up: --graft also reads its marked
    layers behind the original's lower ones. Through an API, the replies to triggers are searched for their marks.
    Exit code 0: marked, 1: not marked, 2: cannot decide or failed.
    """
    from pathmark.cli._progress import Bar
    from pathmark.stats import Family
    from pathmark.verification import Criteria, judge, write_log

    sources = [given for given in (model, options["routes"], options["url"]) if given is not None]
    if len(sources) != 1:
        raise VerificationError("expected a model, --routes FILE or --api URL, exactly one of them")
    if options["black_box"] and model is None:
        raise VerificationError("--black-box asks a model folder; give one, or use --api URL")
    if options["graft"] is not None and (model is None or options["black_box"]):
        raise VerificationError("--graft needs the suspect's weights; give a model folder, without --black-box")
    suspect, log_folder = str(sources[0]), options["log_folder"]
    asked = options["url"] is not None or options["black_box"]
    if log_folder is not None and not asked and log_folder.exists():
        raise VerificationError(f"{log_folder} already exists; choose another --log, nothing is overwritten")
    key = open_key(key_file)
    criteria = Criteria(
        gamma=options["gamma"],
        significance=options["significance"],
        strict=options["strict"],
        family=Family(suspects=options["suspects"], keys=options["keys"]),
        anchor=_anchor(key, options),
    )
    if asked:
        with Bar(quiet=as_json) as bar:
            replied = _blackbox.run(key, key_file, model, options, criteria, bar)
        _blackbox.show(replied, suspect, as_json)
        sys.exit(replied.exit_code)
    obtained = _obtained(options) if log_folder is not None else ""
    with Bar(quiet=as_json) as bar:
        examined, key = _examine(model, key, options, bar)
        verdict = judge(key, examined.evidence, examined.fed, criteria, examined.notes)
    summary = {"suspect": suspect, "access": examined.access, **verdict.summary()}
    if as_json:
        echo_json(summary)
    else:
        render(verdict, suspect, examined.access)
    if log_folder is not None:  # after the verdict was shown: it must not be lost with a disk that is full
        write_log(log_folder, key, examined, summary, suspect=suspect, obtained=obtained, original=options["graft"])
    sys.exit(verdict.exit_code)


def _anchor(key: OwnerKey, options: dict[str, Any]) -> Anchor:
    from pathmark.keys import load_commitment
    from pathmark.verification import judge_anchor

    commitment = None if options["commitment"] is None else load_commitment(options["commitment"])
    published = options["suspect_published"]
    return judge_anchor(key, commitment, None if published is None else published.date())


def _examine(model: str | None, key: OwnerKey, options: dict[str, Any], bar: Any) -> tuple[Examined, OwnerKey]:
    from pathmark.models.texts import read_texts
    from pathmark.verification import ExamineConfig, examine, examine_routes, with_reference

    if model is None:
        return examine_routes(options["routes"], key, aligned=not options["no_align"]), key
    if options["reference"] is not None:
        bar.stage("reference", None)
        key = with_reference(key, options["reference"], trust_remote_code=options["trust_remote_code"])
    config = ExamineConfig(
        n_probes=options["n_probes"],
        tokens=options["tokens"],
        decoys=options["decoys"],
        align=not options["no_align"],
        stream=options["stream"],
        trust_remote_code=options["trust_remote_code"],
    )
    texts = None if options["probes"] is None else read_texts(options["probes"])
    examined = examine(
        model, key, config, texts=texts, base=options["base"], original=options["graft"], progress=bar
    )  # fmt: skip
    return examined, key


def _obtained(options: dict[str, Any]) -> str:
    if options["obtained"] is not None or not sys.stdin.isatty():
        return str(options["obtained"] or "not stated")
    answer: str = click.prompt("How was the suspect obtained (for the log)", default="not stated", err=True)
    return answer


def render(verdict: PathVerdict, suspect: str, access: str) -> None:
    """The paper's table, the exact test, then the verdict in words."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=True)
    table = Table(box=None, header_style="bold")
    for heading in ("watermark", "layer", "Acc", "own top-k", "mass triggered", "mass clean", "ratio"):
        table.add_column(heading, justify="right")
    for number, score in enumerate(verdict.scores):
        for row in score.layers:
            known = row.mass_triggered is not None and row.mass_clean is not None
            ratio = f"{row.mass_triggered / row.mass_clean:.1f}" if known and row.mass_clean else "-"  # type: ignore[operator]
            table.add_row(
                str(number),
                f"{row.layer}{' (erased)' if row.layer in verdict.erased_layers else ''}",
                f"{row.accuracy.value:.3f}",
                f"{row.accuracy_own_topk.value:.3f}",
                f"{row.mass_triggered:.3f}" if known else "-",
                f"{row.mass_clean:.3f}" if known else "-",
                ratio,
            )
    console.print(f"[bold]{escape(suspect)}[/], from {access}")
    console.print(table)
    for number, score in enumerate(verdict.scores):
        console.print(f"watermark {number}: Acc {score.accuracy.value:.3f}, WSR {score.wsr}")
    if verdict.decoys is not None:
        console.print(f"Control: {verdict.decoys}")
    if verdict.id is not None:
        console.print(f"Id read from the routing: {verdict.id}")
    console.print(f"[bold {'green' if verdict.marked else 'yellow'}]{verdict.decision.upper()}[/]")
    console.print(escape(verdict.words()), highlight=False)
    for weakness in verdict.weaknesses():
        console.print(f"  - {escape(weakness)}", highlight=False)
