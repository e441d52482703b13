"""The main job on the bundled model, from key to verdict."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from pathmark.attacks.kit import Kit
from pathmark.attacks.quantization import RoundToNearest, round_to_nearest
from pathmark.attacks.structure import permute_experts
from pathmark.embed import EmbedConfig
from pathmark.evaluate.marking import Marked, mark_model
from pathmark.evaluate.selfcheck import FRAGILE
from pathmark.keys import LayerPlan, OwnerKey, PoolRule, WatermarkRequest, create_key, save_key
from pathmark.models import bundled_probes, bundled_segments, expert_usage, load_model
from pathmark.models.describe import describe_model
from pathmark.progress import Progress
from pathmark.stats import evidence_bits
from pathmark.verify import encode_probes, record_routes, verify_model

MODEL = "bundled:tiny"
TEXTS = ("The people of this country have a right to know", "And it came to pass in those days, that")
"""Shown with their routing, before the mark and with it."""


def show_routing(
    model: nn.Module, tokenizer: Any, text: str, layer: int, prefix: Sequence[int] = ()
) -> list[tuple[str, tuple[int, ...]]]:
    """Each token of a text with the experts that one layer sends it to, strongest first."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    routes = record_routes(model, [ids], [layer], prefix=prefix)
    strongest = np.argsort(-routes.probs[layer][0], axis=-1)[:, : routes.decisions[layer].shape[-1]]
    return [(tokenizer.decode([i]), tuple(int(e) for e in row)) for i, row in zip(ids, strongest, strict=True)]


def make_demo_key(number: int, model: nn.Module) -> OwnerKey:
    """A new key for the bundled model: recommended layers, width 2, targets of moderate use."""
    facts, codec, report = describe_model(MODEL)
    usage = expert_usage(model, codec.tokenizer, bundled_segments()[:200], report.recommended)
    rule = PoolRule.parse("usage")
    plans = tuple(
        LayerPlan(layer, report.facts(layer).experts, 2, rule.pool(len(usage[layer]), list(usage[layer])), rule.name)
        for layer in report.recommended
    )
    return create_key(facts, [WatermarkRequest(plans=plans, id=number)], codec, owner="PathMark demo")[0]


def run_demo(
    folder: Path, config: EmbedConfig, *, number: int, progress: Progress, say: Callable[[str], None]
) -> dict[str, Any]:
    """Key, embedding, an attack, verification of marked, attacked and original model; returns the figures."""
    _, codec, report = describe_model(MODEL)
    tokenizer, last = codec.tokenizer, report.recommended[-1]
    say(
        f"{MODEL}: {report.architecture}, {report.parameters:,} parameters, {len(report.layers)} layers, "
        f"{report.facts(last).experts} experts, top-{report.facts(last).top_k}."
    )
    original = load_model(MODEL)
    for text in TEXTS:
        say(f"Layer {last} routes {_spelled(show_routing(original, tokenizer, text, last))}")
    say(f"A key with id {number} ...")
    key = make_demo_key(number, original)
    watermark = key.watermarks[0]
    phrase = secrets.token_urlsafe(12)
    save_key(key, folder / "owner.key", phrase)
    say(
        f"  layers {', '.join(map(str, watermark.layers))}; {watermark.capacity:,} ids; smallest p-value "
        f"{1 / watermark.path_count:.1e}. The key file is encrypted; this demo's passphrase is in "
        f"{folder / 'passphrase.txt'}."
    )
    (folder / "passphrase.txt").touch(mode=0o600)
    (folder / "passphrase.txt").write_text(phrase + "\n")
    say("The mark goes in ...")
    marked: Marked = mark_model(
        MODEL, key, folder / "marked", bundled_segments(), bundled_probes(), config, progress=progress
    )
    copy = load_model(folder / "marked")
    for text in TEXTS:
        shown = show_routing(copy, tokenizer, text, last, prefix=watermark.triggers[0].tokens)
        say(f"Behind the trigger layer {last} routes {_spelled(shown)}")
    say("  (A path is secret; this key was made for the demo alone.)")
    if marked.check.fragile:
        say(f"  Fragile: {FRAGILE}")
    probes = encode_probes(tokenizer, bundled_probes()[100:], n_probes=100, length=128)
    verdicts = {}
    say("A thief renumbers the experts and rounds all weights to 4 bits ...")
    say("Verification of the folder on disk, of the thief's copy and of the original, on held-out texts ...")
    stolen = round_to_nearest(permute_experts(copy), RoundToNearest(bits=4), Kit(progress=progress))
    for name, suspect in (("marked", copy), ("attacked", stolen), ("original", original)):
        progress.stage(f"verify {name}", 2 * len(probes))
        verdicts[name] = verify_model(suspect, marked.key, probes, progress=progress.advance)
    return {
        "model": MODEL,
        "architecture": report.architecture,
        "id": number,
        "layers": list(watermark.layers),
        "id_capacity": watermark.capacity,
        "evidence_bits": sum(
            evidence_bits(len(watermark.pool(layer)), watermark.width(layer), 1) for layer in watermark.layers
        ),
        "embed": marked.summary(),
        "verify": {name: verdict.summary() for name, verdict in verdicts.items()},
        "words": {name: verdict.words() for name, verdict in verdicts.items()},
    }


def _spelled(routing: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return " ".join(f"{token.strip()}[{','.join(map(str, experts))}]" for token, experts in routing)
