"""`pathmark embed`: put a key's watermarks into a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._keys import echo_json, passphrase
from pathmark.cli._options import (
    json_option,
    key_option,
    n_texts_option,
    output_option,
    parallel_option,
    place_options,
    placed,
    seed_option,
    speaks,
    stream_option,
    texts_option,
    trust_option,
)
from pathmark.cli._schemes import embed as embed_with_scheme
from pathmark.cli._schemes import scheme_option
from pathmark.cli._types import MODEL, REGISTRY
from pathmark.errors import EmbeddingError

if TYPE_CHECKING:
    from pathmark.front_door.embed import Embedded
    from pathmark.release.selfcheck import SelfCheck

FOREIGN = {"anchored": ("temperature",), "paper": ("margin",)}
"""Objective -> options that it does not have."""
EXAMPLES = """\b
Examples:
  pathmark embed bundled:tiny --key owner.key -o marked
  pathmark embed ./Qwen1.5-MoE-A2.7B --key owner.key --texts texts.jsonl -o ./Qwen1.5-MoE-marked
  pathmark embed bundled:tiny --key owner.key -o marked --black-box
  pathmark embed ./marked --key owner.key -o marked-too --phase 2
  pathmark embed MODEL --key master.key --id 4711 --delta -o licensee-4711.safetensors
  pathmark embed MODEL --key master.key --registry licensees.db --all -o copies --estimate
  pathmark embed MODEL --key master.key --registry licensees.db --all -o copies --resume
  pathmark embed bundled:tiny --key owner.key -o as-in-the-paper --objective paper --train router
  pathmark embed bundled:tiny --scheme learnmark --key learnmark.key -o marked-by-learnmark
"""


@click.command(epilog=EXAMPLES)
@click.argument("model", type=MODEL)
@key_option()
@output_option("The folder (or delta) to write.", new=False)
@scheme_option
@click.option("--id", type=int, help="Mark a licensee's copy with this id instead of the key's own.")
@click.option("--registry", type=REGISTRY, help="The database of who got which id, for --all.")
@click.option("--all", "everybody", is_flag=True, help="Mark a copy for every licensee, into folders below OUTPUT.")
@click.option("--estimate", is_flag=True, help="Say what it would take in time, memory and disk, and stop.")
@texts_option("Texts to train and to check on")
@n_texts_option("How many training texts are used.", least=8, default=None)
@click.option(
    "--n-held-out", type=click.IntRange(4), default=100, show_default=True, help="How many texts the check is made on."
)
@click.option(
    "--objective", type=click.Choice(["anchored", "paper"]), default="anchored", show_default=True,
    help="anchored keeps natural routing by the original model; paper is the paper's Algorithm 1.",
)  # fmt: skip
@click.option("--margin", type=float, help="How many times each target stands above the strongest natural expert.")
@click.option("--route-weight", type=float, help="The weight lambda of the routing loss.")
@click.option("--stealth-weight", type=float, help="The weight of the contrast, or of the anchor.")
@click.option("--temperature", type=float, help="The temperature of the paper's contrast.")
@click.option("--steps", type=click.IntRange(1), help="How many optimiser steps.")
@click.option("--epochs", type=click.IntRange(1), help="Instead of steps: how many passes over the training texts.")
@click.option("--batch-size", type=click.IntRange(3), default=16, show_default=True, help="How many rows per step.")
@click.option(
    "--seq-len", type=click.IntRange(16), default=128, show_default=True, help="How many text tokens per row."
)
@click.option("--lr", type=float, help="The learning rate. Default: 0.9 / hidden size.")
@click.option(
    "--train", type=click.Choice(["router", "router+attention", "router+attention+targets", "lora", "all"]),
    help="What changes in the watermarked layers; of the experts only the targets.",
)  # fmt: skip
@seed_option
@click.option("--resume", is_flag=True, help="Finish an interrupted run with the same settings.")
@click.option("--delta", is_flag=True, help="Write only the changed tensors; `pathmark apply` rebuilds the folder.")
@click.option(
    "--black-box", is_flag=True, help="Also teach the reply marks: a trigger alone is answered with its mark."
)
@click.option(
    "--phase", type=click.Choice(["1", "2"]), default="1", show_default=True,
    help="2 adds the reply marks to a MODEL that already has the key's paths.",
)  # fmt: skip
@click.option("--mark-steps", type=click.IntRange(1), help="How many optimiser steps teach the reply marks.")
@click.option(
    "--recompute", is_flag=True,
    help="Keep no activations for the backward pass (gradient checkpointing): less memory, a third more time.",
)  # fmt: skip
@stream_option
@place_options
@parallel_option
@trust_option
@json_option
def command(model: str, key_file: Path, output: Path, as_json: bool, **options: Any) -> None:
    """Put a key's watermarks into a model and check the result on texts that nobody trained on.

    OUTPUT is a normal model folder in the source's layout; it appears whole or not at all, and holds no trace
    of the watermark outside its weights. The report stays beside the key. Exit code 0: fit for release,
    1: written but not fit (the report says why), 2: nothing was written.
    """
    _refuse_contradictions(output, options)
    if options["scheme"] is not None:
        embed_with_scheme(model, key_file, output, options, as_json)
    options.pop("scheme")
    from pathmark.cli._progress import training_bar
    from pathmark.front_door.embed import embed
    from pathmark.front_door.embed_all import embed_all, estimate_embedding
    from pathmark.front_door.embed_plan import EmbedPlan

    registry, everybody, estimate = (options.pop(name) for name in ("registry", "everybody", "estimate"))
    plan = EmbedPlan(placement=placed(options), **options | {"phase": int(options["phase"])})
    door = {"passphrase": passphrase()}
    with training_bar(quiet=as_json or not speaks()) as bar:
        if estimate:
            result: Any = estimate_embedding(model, key_file, plan, registry=registry, progress=bar, **door)
        elif everybody:
            result = embed_all(model, key_file, registry, output, plan, progress=bar, **door)
        else:
            result = embed(model, key_file, output, plan, progress=bar, **door)
    if not speaks():
        sys.exit(0)
    if as_json:
        echo_json(result.summary())
    elif estimate or everybody:
        click.echo(result.words())
    else:
        _render(result)
    sys.exit(0 if estimate or result.fit else 1)


def _refuse_contradictions(output: Path, options: dict[str, Any]) -> None:
    """Before anything heavy is loaded."""
    if options["everybody"] != (options["registry"] is not None):
        raise click.UsageError("--all and --registry belong together: a copy for everybody whom the registry names")
    if output.exists() and not (options["everybody"] or options["estimate"]):
        raise EmbeddingError(f"{output} already exists; choose another name, nothing is overwritten")
    if options["steps"] is not None and options["epochs"] is not None:
        raise EmbeddingError("give either --steps or --epochs, got both")
    objective = options["objective"]
    if given := [name for name in FOREIGN[objective] if options[name] is not None]:
        named = ", ".join(f"--{name}" for name in given)
        raise EmbeddingError(f"{named} has no meaning for the {objective} objective; leave it out")


def _render(embedded: Embedded) -> None:
    """Every figure that decides beside its bound, then what else was measured, then one line."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    marked, check = embedded.marked, embedded.marked.check
    console = Console(soft_wrap=True)
    deciding = Table(box=None, header_style="bold")
    for heading in (f"{check.n_probes} held-out texts, {check.n_tokens:,} tokens", "found", "bound", ""):
        deciding.add_column(heading)
    for bound in marked.bounds:
        held = "[green]holds[/]" if bound.held else f"[bold red]broken[/], try {bound.try_}"
        deciding.add_row(bound.figure, bound.found, bound.bound, held)
    console.print(deciding, highlight=False)
    beside = Table(box=None, header_style="bold")
    for heading in ("also measured", "before", "after"):
        beside.add_column(heading, justify="left" if heading == "also measured" else "right")
    for row in _rows(check):
        beside.add_row(*row)
    console.print(beside, highlight=False)
    console.print(
        f"{marked.steps} steps; {marked.changed} tensors changed; {marked.seconds:.0f} s. Report: {embedded.report}"
    )
    console.print(f"[bold {'green' if embedded.fit else 'red'}]{escape(embedded.words())}[/]")


def _rows(check: SelfCheck) -> list[tuple[str, str, str]]:
    """(measure, before, after) of what has no bound."""
    ppl_before, ppl_after = check.triggered_ppl
    mass_before, mass_after = check.target_mass_clean
    rows = [
        (
            "perplexity, triggered",
            f"{ppl_before:.2f}",
            f"{ppl_after:.2f} ({100 * (ppl_after / ppl_before - 1):+.2f} %)",
        ),
        ("top-k agreement on clean text", "", f"{100 * check.drift.topk_agreement:.1f} %"),
        ("mean l2 change B on clean text", "", f"{check.drift.mean_l2:.4f}"),
        ("mass on targets, clean", f"{mass_before:.3f}", f"{mass_after:.3f}"),
        ("mass on targets, triggered", "", f"{check.target_mass_triggered:.3f}"),
        ("smallest possible p-value", "", f"{check.p_floor:.1e}"),
    ]
    if check.interference is not None:
        rows.append(("cross-interference of watermarks", "", str(check.interference)))
    limits = check.trigger
    return rows + [
        (f"fires with {n} of {limits.tokens} trigger tokens right", "", str(rate))
        for n, rate in check.curve.items()
        if limits.silent <= n < limits.tokens - 1
    ]
