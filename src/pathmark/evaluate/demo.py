"""The main job on the bundled model, from key to verdict."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pathmark.embed import EmbedConfig
from pathmark.evaluate.marking import Marked, Progress, mark_model
from pathmark.keys import LayerPlan, OwnerKey, PoolRule, WatermarkRequest, create_key, save_key
from pathmark.models import bundled_probes, bundled_segments, expert_usage, load_model
from pathmark.models.describe import describe_model
from pathmark.stats import evidence_bits
from pathmark.verify import encode_probes, verify_model

MODEL = "bundled:tiny"


def make_demo_key(number: int) -> OwnerKey:
    """A new key for the bundled model: recommended layers, width 2, targets of moderate use."""
    facts, codec, report = describe_model(MODEL)
    usage = expert_usage(load_model(MODEL), codec.tokenizer, bundled_segments()[:200], report.recommended)
    rule = PoolRule.parse("usage")
    plans = tuple(
        LayerPlan(layer, report.facts(layer).experts, 2, rule.pool(len(usage[layer]), list(usage[layer])), rule.name)
        for layer in report.recommended
    )
    return create_key(facts, [WatermarkRequest(plans=plans, id=number)], codec, owner="PathMark demo")[0]


def run_demo(
    folder: Path, config: EmbedConfig, *, number: int, progress: Progress, say: Callable[[str], None]
) -> dict[str, Any]:
    """Key, embedding, verification of the marked and of the original model; returns the figures."""
    say(f"A key with id {number} for {MODEL} ...")
    key = make_demo_key(number)
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
    say("Verification, on held-out texts, from the folders on disk ...")
    _, codec, report = describe_model(MODEL)
    probes = encode_probes(codec.tokenizer, bundled_probes()[100:], n_probes=100, length=128)
    verdicts = {}
    for name, source in (("marked", folder / "marked"), ("original", MODEL)):
        progress.stage(f"verify {name}", 2 * len(probes))
        verdicts[name] = verify_model(load_model(source), key, probes, progress=progress.advance)
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
