"""`pathmark latency`: the timing channel, at an API or simulated."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._keys import echo_json, json_option, open_key
from pathmark.errors import VerificationError

if TYPE_CHECKING:
    from pathmark.keys import OwnerKey

EXAMPLES = """\b
Examples:
  pathmark latency --api http://localhost:8000/v1 --api-model suspect --key owner.key
  pathmark latency --api https://api.example.com/v1 --api-model m --api-key-env API_KEY \\
      --key owner.key --tokenizer ./Qwen1.5-MoE-A2.7B --pairs 400 --effect 0.05 --log run.jsonl
  pathmark latency --simulate ./marked --key owner.key --devices 8
  pathmark latency --simulate ./marked --key owner.key --devices 8 --costs qwen1.5-moe --placement balanced
"""


@click.command(epilog=EXAMPLES)
@click.option("--key", "key_file", required=True, type=click.Path(path_type=Path), help="Key made by keygen.")
@click.option("--api", "url", help="OpenAI-compatible API to time.")
@click.option("--api-model", help="Name under which the API serves the model.")
@click.option("--api-key-env", help="Environment variable that holds the API key.")
@click.option(
    "--endpoint", type=click.Choice(["auto", "chat", "completions"]), default="auto", show_default=True,
    help="Which endpoint to ask.",
)  # fmt: skip
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds for one request.")
@click.option(
    "--tokenizer", default="bundled:tiny", show_default=True,
    help="Model whose tokenizer the key was made for; no weights are read.",
)  # fmt: skip
@click.option("--texts", type=click.Path(path_type=Path), help="Texts (.txt, .jsonl, folder). Default: bundled.")
@click.option("--pairs", type=click.IntRange(1), default=100, show_default=True, help="Triggered / clean pairs.")
@click.option(
    "--calibration", type=click.IntRange(10), default=40, show_default=True, help="Pairs without the trigger, first."
)
@click.option("--tokens", type=click.IntRange(4), default=256, show_default=True, help="Text tokens per request.")
@click.option("--max-tokens", type=click.IntRange(1), default=1, show_default=True, help="Tokens to generate.")
@click.option("--significance", type=float, default=0.01, show_default=True, help="Level of the test.")
@click.option("--effect", type=float, default=0.08, show_default=True, help="Slowdown to look for, as a share.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order inside pairs.")
@click.option("--log", type=click.Path(path_type=Path), help="JSON lines of times; an interrupted run goes on from it.")
@click.option("--simulate", "model", help="Instead of an API: a marked model, its routing and assumed costs.")
@click.option("--devices", type=click.IntRange(1), default=8, show_default=True, help="Devices that share the experts.")
@click.option(
    "--placement", type=click.Choice(["contiguous", "round-robin", "balanced"]), default="contiguous",
    show_default=True, help="Which expert is on which device.",
)  # fmt: skip
@click.option(
    "--costs", type=click.Choice(["model", "qwen1.5-moe"]), default="model", show_default=True,
    help="Whose layer sizes the simulated costs follow.",
)  # fmt: skip
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Texts per simulated batch.")
@json_option
def command(key_file: Path, url: str | None, model: str | None, as_json: bool, **options: Any) -> None:
    """Time triggered against clean requests at an API, or simulate what a mark costs where experts are spread.

    Corroboration only: a slow trigger proves no ownership. Calibration pairs, which don't hold the trigger, come
    first; where they show that the effect looked for could not be seen, the trigger is not sent. Exit code 0:
    triggered requests are slower, 1: they are not, 2: could not decide. The simulator always exits with 0.
    """
    if (url is None) == (model is None):
        raise VerificationError("give either --api with --api-model, or --simulate MODEL")
    key = open_key(key_file)
    if model is not None:
        _simulate(key, model, options, as_json)
        return
    if not options["api_model"]:
        raise VerificationError("--api needs --api-model, the name under which the model is served")
    assert url is not None
    sys.exit(_measure(key, key_file, url, options, as_json))


def _measure(key: OwnerKey, key_file: Path, url: str, options: dict[str, Any], as_json: bool) -> int:
    from pathmark.cli._progress import Bar
    from pathmark.keys import Ledger, trigger_refs
    from pathmark.models import load_tokenizer
    from pathmark.models.tokenization import HFTextCodec
    from pathmark.verification.blackbox.api import ApiClient, ApiSettings
    from pathmark.verification.blackbox.latency import verify_latency
    from pathmark.verification.blackbox.latency_plan import LatencyConfig, plan_latency
    from pathmark.verification.blackbox.latency_timing import LatencyLog, through_api

    client = ApiClient(
        ApiSettings(
            url=url, model=options["api_model"], endpoint=options["endpoint"], api_key_env=options["api_key_env"],
            timeout=options["timeout"], concurrency=1, retries=0, deadline=86400.0,
        )
    )  # fmt: skip
    log = None if options["log"] is None else LatencyLog(options["log"])
    ledger = Ledger.beside(key_file)
    begun = None if log is None else log.trigger
    trigger = begun or next(iter(ledger.unused_triggers(key)), trigger_refs(key)[0])
    codec = HFTextCodec(load_tokenizer(options["tokenizer"]))
    config = LatencyConfig(
        trigger=trigger, pairs=options["pairs"], calibration=options["calibration"], text_tokens=options["tokens"],
        max_tokens=options["max_tokens"], seed=options["seed"],
    )  # fmt: skip
    plan = plan_latency(key, codec, _texts(options["texts"]), config)

    def disclose(detectable: float) -> None:
        if not as_json:
            click.echo(
                f"{options['pairs']} pairs at this noise show a slowdown of {100 * detectable:.1f} % four times out of "
                f"five (looked for: {100 * options['effect']:.1f} %). Now the trigger is sent.",
                err=True,
            )
        ledger.record(key, trigger, host=client.host, model=client.model, times=options["pairs"])

    with Bar(quiet=as_json) as bar:
        verdict = verify_latency(
            through_api(client), plan, significance=options["significance"], expected=options["effect"],
            log=log, disclose=disclose, progress=bar,
        )  # fmt: skip
    if as_json:
        echo_json({"host": client.host, "model": client.model, **verdict.summary()})
    else:
        click.echo(verdict.words())
    return verdict.exit_code


def _simulate(key: OwnerKey, model: str, options: dict[str, Any], as_json: bool) -> None:
    from dataclasses import asdict

    from pathmark.evaluate.expert_parallel import QWEN_MOE, Hardware, layer_sizes, record_twins, simulate_routes
    from pathmark.models import load_model
    from pathmark.models.describe import describe_model
    from pathmark.stats import latency_margin
    from pathmark.verification import encode_probes

    _, codec, report = describe_model(model)
    loaded = load_model(model)
    sizes = layer_sizes(loaded) if options["costs"] == "model" else QWEN_MOE
    deployment = Hardware().deployment(sizes, options["devices"], options["placement"])
    texts = _texts(options["texts"])
    probes = encode_probes(codec.tokenizer, texts, n_probes=options["pairs"], length=options["tokens"])
    triggered, clean, experts = record_twins(loaded, key, codec, probes)
    overhead = simulate_routes(triggered, clean, experts, deployment, batch=options["batch"])
    watermark = key.watermarks[0]
    margins = {
        layer: latency_margin(
            min(watermark.width(layer), report.facts(layer).top_k), report.facts(layer).top_k, options["devices"]
        )
        for layer in watermark.layers
    }
    summary = {
        "model": model,
        "overhead": overhead.value,
        "overhead_per_layer": overhead.per_layer,
        "batches": len(overhead.clean),
        "texts": len(probes),
        "tokens_per_batch": options["batch"] * max(len(probe) for probe in probes),
        "watermark_layers": list(watermark.layers),
        "paper_margin": margins,
        "assumptions": asdict(deployment),
    }
    if as_json:
        echo_json(summary)
    else:
        _render(summary)


def _texts(path: Path | None) -> list[str]:
    from pathmark.models import bundled_probes, bundled_segments
    from pathmark.models.texts import read_texts

    return [*bundled_probes(), *bundled_segments()] if path is None else read_texts(path)


def _render(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, costs = Console(soft_wrap=True), summary["assumptions"]
    table = Table(box=None, header_style="bold")
    for heading in ("layer", "slowdown", "paper's margin"):
        table.add_column(heading, justify="right")
    for layer, share in summary["overhead_per_layer"].items():
        margin = summary["paper_margin"].get(layer)
        table.add_row(str(layer), f"{100 * share:+.1f} %", "" if margin is None else f"{margin:+.2f}")
    console.print(table)
    console.print(
        f"[bold]Predicted overhead {100 * summary['overhead']:+.1f} %[/] on {costs['devices']} devices "
        f"({costs['placement']}), {summary['batches']} batches of {summary['tokens_per_batch']:,} tokens. Assumed: "
        f"{1e6 * costs['pair_seconds']:.3g} µs per token and expert, at least {1e6 * costs['expert_seconds']:.3g} µs "
        f"per expert in use, {1e6 * costs['copy_seconds']:.3g} µs per token sent, "
        f"{1e6 * costs['message_seconds']:.3g} µs per all-to-all, {1e6 * costs['token_seconds']:.3g} µs per token "
        "elsewhere. See docs/latency.md."
    )
