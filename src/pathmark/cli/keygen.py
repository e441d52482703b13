"""`pathmark keygen`: a new key for a model."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pathmark.cli._keys import describe_key, echo_json, json_option, new_passphrase, render_key
from pathmark.errors import CapacityError, KeyFileError

if TYPE_CHECKING:
    from pathmark.keys import LayerPlan, OwnerKey, PoolRule
    from pathmark.models import ModelReport

SIGNIFICANCE = 1e-6
"""The default level of `pathmark verify`; keygen warns where one lost layer puts it out of reach."""

POOL_TEXTS = 200
"""Texts on which clean use of experts is measured."""

EXAMPLES = """\b
Examples:
  pathmark keygen --model bundled:tiny -o owner.key --owner "Example Lab"
  pathmark keygen --model ./Qwen1.5-MoE-A2.7B -o owner.key --layers 18-23 --id 42 --pool usage:0.25-4
  pathmark keygen --model MODEL -o two.key --watermarks 2 --layers 18-23 --layers 12-17
  pathmark keygen --model MODEL -o owner.key --redundancy 1 --triggers 4
"""


@click.command(epilog=EXAMPLES)
@click.option("--model", required=True, help="Folder, hub id or bundled:tiny.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Key file to write.")
@click.option("--owner", default="", help="Name that stands in the commitments.")
@click.option("--id", "ids", type=int, multiple=True, help="Id of a watermark; repeatable. Default: from the key.")
@click.option("--watermarks", type=click.IntRange(1), help="How many. Default: one, or one per --layers.")
@click.option("--layers", multiple=True, help="Such as 18-23 or 12,14,20; repeatable, one per watermark.")
@click.option("--width", default=2, show_default=True, type=click.IntRange(1), help="Target experts per layer.")
@click.option(
    "--pool",
    default="auto",
    show_default=True,
    help="Which experts may be targets: all, usage:LOW-HIGH (times the mean use on clean text), or auto: "
    "usage:0.25-4 where the weights fit in memory, otherwise all.",
)
@click.option("--pool-texts", type=click.Path(path_type=Path), help="Clean text, one per line. Default: bundled.")
@click.option("--triggers", default=1, show_default=True, type=click.IntRange(1), help="Triggers per watermark.")
@click.option("--trigger-tokens", default=8, show_default=True, type=int, help="Tokens in a drawn trigger.")
@click.option("--trigger", "trigger_texts", multiple=True, help="Free text instead; repeatable, one per trigger.")
@click.option("--mark", "mark_texts", multiple=True, help="Free text as reply; repeatable, one per trigger.")
@click.option("--redundancy", default=0, show_default=True, type=click.IntRange(0), help="Layers an id survives.")
@click.option("--plain", is_flag=True, help="Store the key without encryption.")
@click.option("--trust-remote-code", is_flag=True, help="Run the model folder's own Python code.")
@json_option
def command(model: str, output: Path, plain: bool, as_json: bool, **options: Any) -> None:
    """Make a key for a model: its triggers, its target experts, and the ids it can carry.

    The key file is encrypted with a passphrase (PATHMARK_PASSPHRASE, or asked for), readable by you
    alone, and never overwritten. Back it up: without it nothing can be proved.
    """
    import os

    from pathmark.keys import create_key, save_key
    from pathmark.models.describe import describe_model

    if os.path.lexists(output):
        raise KeyFileError(f"{output} already exists; choose another name, key material is never overwritten")
    phrase = None if plain else new_passphrase()
    facts, codec, report = describe_model(model, trust_remote_code=options["trust_remote_code"])
    requests, notes = plan_watermarks(model, report, codec.tokenizer, options)
    key, warnings = create_key(facts, requests, codec, owner=options["owner"])
    save_key(key, output, phrase, plain=plain)
    warnings += weak_evidence(key)
    if plain:
        warnings.append("the key is stored without encryption: whoever reads the file has the key")
    shown = {"file": str(output), **describe_key(key), "warnings": [*notes, *warnings]}
    if as_json:
        echo_json(shown)
        return
    render_key(shown)
    for warning in shown["warnings"]:
        click.echo(f"note: {warning}", err=True)
    click.echo(f"\nWritten to {output}. Next: pathmark key backup {output}, then pathmark commit {output}.")


def weak_evidence(key: OwnerKey) -> list[str]:
    """Watermarks that could not convince at 1e-6 any more once a layer is lost."""
    return [
        f"watermark {mark.index}: with one layer erased its smallest p-value is above {SIGNIFICANCE:g}; "
        "more layers, a wider pool or a width nearer to half of it give more"
        for mark in key.watermarks
        if mark.paths_after_erasures(1) * SIGNIFICANCE < 1
    ]


def parse_layers(text: str) -> tuple[int, ...]:
    """`18-23`, `12,14,20` or both mixed, as rising layer indices."""
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or len(part) > 11:
            raise CapacityError(f"cannot read layers {text!r}; expected such as 18-23 or 12,14,20")
        low, high = int(first), int(last or first)
        if high < low or high - low > 10_000:
            raise CapacityError(f"cannot read layers {text!r}; {part} does not rise")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def plan_watermarks(
    model: str, report: ModelReport, tokenizer: Any, options: dict[str, Any]
) -> tuple[list[Any], list[str]]:
    """Requests for create_key, and notes about what was chosen for the owner."""
    from pathmark.keys import WatermarkRequest

    spans = [parse_layers(text) for text in options["layers"]] or [report.recommended]
    count = options["watermarks"] or len(spans)
    if len(spans) not in (1, count):
        raise CapacityError(f"expected --layers once or {count} times, once per watermark, got {len(spans)}")
    if len(options["ids"]) > count:
        raise CapacityError(f"expected at most {count} --id, one per watermark, got {len(options['ids'])}")
    spans = spans * count if len(spans) == 1 else spans
    layers = sorted({layer for span in spans for layer in span})
    plans, notes = _plans(model, report, tokenizer, layers, options)
    per_mark = options["triggers"]
    texts = {name: _share_out(options[f"{name}_texts"], per_mark, count, name) for name in ("trigger", "mark")}
    requests = [
        WatermarkRequest(
            plans=tuple(plans[layer] for layer in span),
            id=options["ids"][i] if i < len(options["ids"]) else None,
            redundancy=options["redundancy"],
            triggers=per_mark,
            trigger_tokens=options["trigger_tokens"],
            trigger_texts=texts["trigger"][i],
            mark_texts=texts["mark"][i],
        )
        for i, span in enumerate(spans)
    ]
    return requests, notes


def _share_out(texts: Sequence[str], per_mark: int, count: int, name: str) -> list[tuple[str, ...]]:
    """Free texts dealt to the watermarks in order; none, or one for every trigger of the key."""
    if texts and len(texts) != per_mark * count:
        raise CapacityError(f"expected no --{name} or {per_mark * count}, one per trigger, got {len(texts)}")
    return [tuple(texts[i * per_mark : (i + 1) * per_mark]) for i in range(count)]


def _plans(
    model: str, report: ModelReport, tokenizer: Any, layers: Sequence[int], options: dict[str, Any]
) -> tuple[dict[int, LayerPlan], list[str]]:
    from pathmark.keys import LayerPlan, PoolRule

    for layer in layers:
        if not report.facts(layer).is_moe:
            raise CapacityError(f"layer {layer} is dense; routed layers: {_listed(report)}")
    notes: list[str] = []
    asked = options["pool"]
    if asked == "auto":
        reason = _why_not_usage(report)
        asked = "all" if reason else "usage"
        if reason:
            notes.append(f"all experts may be targets, since {reason}; --pool usage:LOW-HIGH spares rare ones")
    rule = PoolRule.parse(asked)
    usage, name = _usage(model, tokenizer, layers, rule, options) if rule.needs_usage else ({}, rule.name)
    plans = {}
    for layer in layers:
        experts = report.facts(layer).experts
        pool = rule.pool(experts, usage.get(layer))
        if len(pool) < options["width"]:
            raise CapacityError(
                f"layer {layer}: rule {rule.name} admits {len(pool)} of {experts} experts, width "
                f"{options['width']} needs more; use --pool all, wider bounds or other layers"
            )
        plans[layer] = LayerPlan(layer, experts, options["width"], pool, name)
    return plans, notes


def _usage(
    model: str, tokenizer: Any, layers: Sequence[int], rule: PoolRule, options: dict[str, Any]
) -> tuple[dict[int, Any], str]:
    """Use of experts on clean text, and the rule's name with the digest of that text."""
    from pathmark.models import bundled_segments, expert_usage, load_model

    if options["pool_texts"] is None:
        texts = list(bundled_segments()[:POOL_TEXTS])
    else:
        try:
            lines = options["pool_texts"].read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise CapacityError(f"cannot read {options['pool_texts']} as text: {error}") from None
        texts = [line for line in lines if line.strip()][:POOL_TEXTS]
    if not texts:
        raise CapacityError("no clean text to measure the use of experts on; expected one text per line")
    loaded = load_model(model, trust_remote_code=options["trust_remote_code"])
    digest = sha256("\n".join(texts).encode()).hexdigest()
    return expert_usage(loaded, tokenizer, texts, layers), f"{rule.name} on texts sha256:{digest}"


def _why_not_usage(report: ModelReport) -> str | None:
    """Why clean use is not measured by default, or None if it can be."""
    import os

    if report.weights != "ok":
        return f"the weights are {report.weights}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if report.parameters * 4 > memory // 2:
        return "the weights take more than half of the free memory"
    return None


def _listed(report: ModelReport) -> str:
    return ", ".join(str(facts.layer) for facts in report.routed)
