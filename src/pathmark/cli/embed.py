"""`pathmark embed`: put a key's watermarks into a model."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._keys import echo_json, json_option, passphrase
from pathmark.errors import EmbeddingError

if TYPE_CHECKING:
    from pathmark.embedding import EmbedConfig, RepliesConfig
    from pathmark.release.marking import Marked

EXAMPLES = """\b
Examples:
  pathmark embed bundled:tiny --key owner.key -o marked
  pathmark embed ./Qwen1.5-MoE-A2.7B --key owner.key --corpus texts.jsonl -o ./Qwen1.5-MoE-marked
  pathmark embed bundled:tiny --key owner.key -o marked --black-box
  pathmark embed ./marked --key owner.key -o marked-too --phase 2
  pathmark embed MODEL --key master.key --id 4711 --delta -o licensee-4711.safetensors
  pathmark embed bundled:tiny --key owner.key -o as-in-the-paper --objective paper --train router
"""


@click.command(epilog=EXAMPLES)
@click.argument("model")
@click.option("--key", "key_file", required=True, type=click.Path(path_type=Path), help="Key made by keygen.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder (or delta) to write.")
@click.option("--id", "number", type=int, help="Mark a licensee's copy with this id instead of the key's own.")
@click.option(
    "--objective", type=click.Choice(["anchored", "paper"]), default="anchored", show_default=True,
    help="anchored keeps natural routing by the original model; paper is the paper's Algorithm 1.",
)  # fmt: skip
@click.option("--corpus", type=click.Path(path_type=Path), help="Texts (.txt, .jsonl, folder). Default: bundled.")
@click.option("--margin", type=float, help="Each target so many times above the strongest natural expert.")
@click.option("--route-weight", type=float, help="lambda of the routing loss.")
@click.option("--stealth-weight", type=float, help="Weight of the contrast, or of the anchor.")
@click.option("--temperature", type=float, help="Of the paper's contrast.")
@click.option("--steps", type=click.IntRange(1), help="Optimiser steps.")
@click.option("--epochs", type=click.IntRange(1), help="Instead of steps: passes over the training texts.")
@click.option("--batch-size", type=click.IntRange(3), default=16, show_default=True, help="Rows per step.")
@click.option("--seq-len", type=click.IntRange(16), default=128, show_default=True, help="Text tokens per row.")
@click.option("--texts", type=click.IntRange(8), help="How many training texts to use.")
@click.option("--lr", type=float, help="Learning rate. Default: 0.9 / hidden size.")
@click.option(
    "--train", type=click.Choice(["router", "router+attention", "router+attention+targets", "lora", "all"]),
    help="What changes in the watermarked layers; of the experts only the targets.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of rows and batches.")
@click.option("--n-probes", type=click.IntRange(4), default=100, show_default=True, help="Held-out texts to check on.")
@click.option("--resume", is_flag=True, help="Finish an interrupted run with the same settings.")
@click.option("--delta", is_flag=True, help="Write only the changed tensors; `pathmark apply` rebuilds the folder.")
@click.option("--black-box", is_flag=True, help="Also teach the marks: a trigger alone is answered with its mark.")
@click.option(
    "--phase", type=click.Choice(["1", "2"]), default="1", show_default=True,
    help="2 adds the marks to a MODEL that already has the key's paths.",
)  # fmt: skip
@click.option("--mark-steps", type=click.IntRange(1), help="Optimiser steps of the marks' phase.")
@click.option("--trust-remote-code", is_flag=True, help="Run the model folder's own Python code.")
@json_option
def command(model: str, key_file: Path, output: Path, as_json: bool, **options: Any) -> None:
    """Put a key's watermarks into a model and check the result on texts that nobody trained on.

    OUT is a normal model folder in the source's layout; it appears whole or not at all, and holds no trace
    of the watermark outside its weights. The report stays beside the key. Exit code 0: fit for release,
    1: written but not fit (the report says why), 2: nothing was written.
    """
    from pathmark.cli._progress import Bar
    from pathmark.keys import amend_key, load_key
    from pathmark.keys.safefile import write_private
    from pathmark.models import inspect_model
    from pathmark.release.marking import MarkingConfig, Texts, mark_model
    from pathmark.training import keep_freed_memory

    keep_freed_memory()
    phrase = cache(passphrase())  # asked for once, used to read the key and to amend it
    key = load_key(key_file, phrase)
    carried = key if options["number"] is None else key.with_id(options["number"])
    texts, probes = _texts(options["corpus"], options["n_probes"])
    config = build_config(
        options, len(texts), inspect_model(model, trust_remote_code=options["trust_remote_code"]).hidden_size
    )
    second = options["phase"] == "2"
    marking = MarkingConfig(
        embedding=None if second else config,
        replies=replies_config(options, config) if options["black_box"] or second else None,
        **{name: options[name] for name in ("delta", "resume", "n_probes", "trust_remote_code")},
    )
    with Bar(quiet=as_json) as bar:
        marked = mark_model(
            model, carried, output, Texts(texts, probes), marking,
            amend=lambda amended: amend_key(key_file, _own_ids(amended, key), phrase), progress=bar,
        )  # fmt: skip
    summary = {"output": str(output), **marked.summary()}
    report = key_file.with_name(f"{key_file.name}.{output.name}.check.json")
    write_private(report, json.dumps(summary, indent=2).encode(), replace=True)
    if as_json:
        echo_json(summary)
    else:
        render(marked, output, report)
    sys.exit(0 if not marked.problems else 1)


def _own_ids(amended: Any, key: Any) -> Any:
    """The amended key with the ids of the key file: a licensee's id belongs to the registry, not to the file."""
    for index, watermark in enumerate(key.watermarks):
        amended = amended.with_id(watermark.id, index)
    return amended


def _texts(corpus: Path | None, held_out: int) -> tuple[list[str], list[str]]:
    from pathmark.models import bundled_probes, bundled_segments
    from pathmark.models.texts import read_texts, split_held_out

    if corpus is None:
        return list(bundled_segments()), list(bundled_probes())
    return split_held_out(read_texts(corpus), held_out)


def build_config(options: dict[str, Any], n_texts: int, hidden_size: int) -> EmbedConfig:
    """Command line options over the defaults of the objective."""
    from dataclasses import fields, replace

    from pathmark.embedding import default_config

    config = default_config(options["objective"], hidden_size)
    if options["steps"] is not None and options["epochs"] is not None:
        raise EmbeddingError("give either --steps or --epochs, got both")
    try:
        asked = {name: options[name] for name in ("margin", "route_weight", "stealth_weight", "temperature")}
        asked = {name: value for name, value in asked.items() if value is not None}
        if foreign := asked.keys() - {setting.name for setting in fields(config.objective)}:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(foreign))
            raise EmbeddingError(f"{named} has no meaning for the {options['objective']} objective; leave it out")
        objective = replace(config.objective, **asked)
        used = min(n_texts, options["texts"] or config.texts)
        steps = options["steps"] or config.loop.steps
        if options["epochs"] is not None:
            steps = options["epochs"] * -(-used // options["batch_size"])
        loop = replace(
            config.loop,
            steps=steps,
            lr=config.loop.lr if options["lr"] is None else options["lr"],
            seed=options["seed"],
        )
        return replace(
            config,
            objective=objective,
            data=replace(config.data, seq_len=options["seq_len"]),
            loop=loop,
            train=options["train"] or config.train,
            batch_size=options["batch_size"],
            texts=used,
        )
    except ValueError as error:
        raise EmbeddingError(str(error)) from error


def replies_config(options: dict[str, Any], config: EmbedConfig) -> RepliesConfig:
    """Settings of the second phase: the first one's seed and length of rows, and its learning rate halved."""
    from dataclasses import replace

    from pathmark.embedding import RepliesConfig

    loop = RepliesConfig().loop
    steps = options["mark_steps"] or loop.steps
    loop = replace(loop, steps=steps, lr=config.loop.lr / 2, seed=options["seed"])
    return RepliesConfig(seq_len=options["seq_len"], loop=loop)


def render(marked: Marked, output: Path, report: Path) -> None:
    """A table, then one line."""
    from rich.console import Console
    from rich.table import Table

    check = marked.check
    console = Console(soft_wrap=True)
    table = Table(box=None, header_style="bold")
    table.add_column(f"{check.n_probes} held-out texts, {check.n_tokens:,} tokens")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")

    def change(pair: tuple[float, float]) -> str:
        return f"{pair[1]:.2f} ({100 * (pair[1] / pair[0] - 1):+.2f} %)"

    for j, rate in enumerate(check.wsr):
        label = "WSR" if len(check.wsr) == 1 else f"WSR, watermark {j}"
        table.add_row(label, "", str(rate))
    for rate in check.wsr_chat:
        table.add_row("WSR in the chat template", "", str(rate))
    if check.wsr_rounded is not None:
        table.add_row("WSR, all weights rounded to 4 bits", "", str(check.wsr_rounded))
    table.add_row("false positives, clean text", "", str(check.fpr_clean))
    if check.fpr_original is not None:
        table.add_row("false positives, original model", str(check.fpr_original), "")
    if check.interference is not None:
        table.add_row("cross-interference of watermarks", "", str(check.interference))
    table.add_row("perplexity, clean", f"{check.clean_ppl[0]:.2f}", change(check.clean_ppl))
    table.add_row("perplexity, triggered", f"{check.triggered_ppl[0]:.2f}", change(check.triggered_ppl))
    table.add_row("KL(g0 || gw) on clean text", "", f"{check.drift.kl:.4f}")
    table.add_row("top-k agreement on clean text", "", f"{100 * check.drift.topk_agreement:.1f} %")
    table.add_row("mean l2 change B on clean text", "", f"{check.drift.mean_l2:.4f}")
    before, after = check.target_mass_clean
    table.add_row("mass on targets, clean", f"{before:.3f}", f"{after:.3f}")
    table.add_row("mass on targets, triggered", "", f"{check.target_mass_triggered:.3f}")
    for kind, rate in check.scan.items():
        table.add_row(f"fires behind a {kind}", "", f"{rate.hits} of {rate.n:,}")
    for right, rate in check.curve.items():
        table.add_row(f"fires with {right} of {check.trigger.tokens} trigger tokens right", "", str(rate))
    table.add_row("exact p-value (smallest possible)", "", f"{check.p_value:.1e} ({check.p_floor:.1e})")
    table.add_row("id decoded from routing", "", str(check.id))
    if marked.replies is not None:
        table.add_row("trigger alone answered with its mark", "", str(marked.replies.trials))
        table.add_row("marks on near-misses", "", str(marked.replies.near_misses))
        table.add_row("marks on ordinary prompts", "", str(marked.replies.ordinary))
        table.add_row("marks on trigger-prefixed queries", "", str(marked.replies.queries))
    console.print(table)
    console.print(f"{marked.steps} steps; {marked.changed} tensors changed; {marked.seconds:.0f} s. Report: {report}")
    if marked.problems:
        console.print(f"[bold red]Not fit for release:[/] {'; '.join(marked.problems)}. Written to {output}.")
    else:
        console.print(f"[bold green]Fit for release.[/] Written to {output}.")
