"""Figures of docs/statistics.md: false claims over many keys, and how little is enough.

python benchmarks/verify_figures.py nobody --key owner.key --marked DIR [--keys 10000]
python benchmarks/verify_figures.py little --key owner.key --marked DIR
python benchmarks/verify_figures.py render

`nobody`: random keys with random triggers, few short probes each, alignment on, against the original and against
somebody else's marked model; then the key itself against the original, differently marked and random-weight models.
`little`: p-value and id against the number of probes and their length, over several draws of the texts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from marked import fixed_key
from pages import DOCS, write_section
from pathmark.embedding import default_config
from pathmark.keys import OwnerKey, load_key
from pathmark.models import bundled_probes, load_model, load_tokenizer
from pathmark.release import ScanConfig
from pathmark.release.marking import MarkingConfig, Texts, mark_model
from pathmark.stats import LayerMeasurement, Rate, exact_test
from pathmark.verification import encode_probes, measure_layers, record_evidence, record_routes, verify_model
from pathmark.verification.paths.alignment import profile_texts

RESULTS = Path(__file__).parent / "results"
DOC = DOCS / "statistics.md"
LEVELS = (0.5, 0.1, 0.05, 0.01, 0.001)
ALPHA = 1e-6
TEXTS_PER_KEY, TOKENS = 3, 16


def strangers_p(model, key: OwnerKey, count: int, seed: int) -> list[float]:
    """p-values of random keys: each has its own trigger and its own targets, and the owner's alignment."""
    rng = random.Random(seed)
    texts = [text[:TOKENS] for text in profile_texts(key)]
    vocabulary = range(3, key.model.vocab_size)
    watermark = key.watermarks[0]
    alignment = record_evidence(model, key, profile_texts(key)[:2]).alignment
    assert alignment is not None
    p_values: list[float] = []
    while len(p_values) < count:
        rows = [rng.sample(texts, TEXTS_PER_KEY) for _ in range(min(256, count - len(p_values)))]
        triggers = [tuple(rng.choices(vocabulary, k=8)) for _ in rows]
        flat = [text for chosen in rows for text in chosen]
        prefixes = [trigger for trigger in triggers for _ in range(TEXTS_PER_KEY)]
        clean = alignment.apply(record_routes(model, flat, watermark.layers))
        behind = alignment.apply(record_routes(model, flat, watermark.layers, prefix=prefixes))
        for i in range(len(rows)):
            part = slice(i * TEXTS_PER_KEY, (i + 1) * TEXTS_PER_KEY)
            measured = measure_layers(watermark, behind.part(part), clean.part(part))
            p_values.append(exact_test([aim_at_random(m, rng) for m in measured]).p_value)
        print(len(p_values), flush=True)
    return p_values


def aim_at_random(measurement: LayerMeasurement, rng: random.Random):
    return measurement.aim(tuple(sorted(rng.sample(list(measurement.pool), 2))))


def random_model(seed: int):
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(Path(load_tokenizer("bundled:tiny").name_or_path))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(std=0.3)
    return model


def nobody(key: OwnerKey, marked: Path, count: int, others: int) -> None:
    result: dict[str, object] = {"keys": count, "texts": TEXTS_PER_KEY, "tokens": TOKENS, "levels": LEVELS}
    suspects = {
        "original": "bundled:tiny",
        "somebody else's marked model": marked,
        "somebody else's marked model, other keys": marked,
    }
    for name, folder in suspects.items():
        p_values = np.array(strangers_p(load_model(folder), key, count, seed=777 if "other" in name else len(name)))
        result[name] = {
            "shares": [float((p_values <= level).mean()) for level in LEVELS],
            "smallest": float(p_values.min()),
            "claims": int((p_values <= ALPHA).sum()),
        }
        print(name, result[name], flush=True)
    probes = profile_texts(key)[:30]
    verdicts = {"original": verify_model(load_model("bundled:tiny"), key, probes)}
    config = default_config()
    config = replace(config, loop=replace(config.loop, steps=120), texts=80)
    for seed in range(others):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "other"
            scan = ScanConfig(random_sequences=5, per_count=2)
            other = mark_model(
                "bundled:tiny", fixed_key(100 + seed), out, Texts.bundled(),
                MarkingConfig(embedding=config, n_probes=30, scan=scan),
            )  # fmt: skip
            model = load_model(out)
        verdicts[f"marked with key {seed}"] = verify_model(model, key, probes)
        print(seed, "its own key:", verify_model(model, other.key, probes).p, flush=True)
    for seed in range(20):
        verdicts[f"random weights {seed}"] = verify_model(random_model(seed), key, probes[:10])
    verdicts["marked"] = verify_model(load_model(marked), key, probes)
    result["verdicts"] = {name: {"p": v.p.value, "marked": v.marked, "id": v.id} for name, v in verdicts.items()}
    print(result["verdicts"], flush=True)
    (RESULTS / "verify_nobody.json").write_text(json.dumps(result, indent=1) + "\n")


def little(key: OwnerKey, marked: Path) -> None:
    model, tokenizer = load_model(marked), load_tokenizer("bundled:tiny")
    watermark, rng, rows = key.watermarks[0], random.Random(0), []
    for tokens in (10, 50, 128, 512):
        probes = encode_probes(tokenizer, bundled_probes(), n_probes=200, length=tokens)
        clean = record_routes(model, probes, watermark.layers)
        behind = record_routes(model, probes, watermark.layers, prefix=watermark.triggers[0].tokens)
        for count in (1, 3, 10, 100):
            draws = 20 if count < 100 else 5
            p_values = []
            for _ in range(draws):
                chosen = rng.sample(range(len(probes)), count)
                measured = measure_layers(watermark, behind.part(chosen), clean.part(chosen))
                p_values.append(exact_test([m.aim(watermark.targets(m.layer)) for m in measured]).p_value)
            rows.append(
                {
                    "tokens": tokens,
                    "probes": count,
                    "draws": draws,
                    "median": float(np.median(p_values)),
                    "worst": float(max(p_values)),
                    "marked": sum(p <= ALPHA for p in p_values),
                }
            )
            print(rows[-1], flush=True)
    (RESULTS / "verify_little.json").write_text(json.dumps(rows, indent=1) + "\n")


def render() -> None:
    """Rewrite the measured part of docs/statistics.md from the JSON files."""
    parts = ["## Keys held against models", ""]
    path = RESULTS / "verify_nobody.json"
    if path.exists():
        found = json.loads(path.read_text())
        parts += [
            f"{found['keys']:,} random keys (own trigger and targets each, {found['texts']} texts of {found['tokens']} "
            "tokens, alignment on). P(p ≤ a), which may not exceed a, and claims at 1e-6:",
            "",
            "| suspect | " + " | ".join(f"a = {level:g}" for level in found["levels"]) + " | smallest p | claims |",
            "|---|" + "---|" * (len(found["levels"]) + 2),
        ]
        suspects = [name for name, row in found.items() if isinstance(row, dict) and "shares" in row]
        for name in suspects:
            row = found[name]
            shares = " | ".join(f"{share:.4f}" for share in row["shares"])
            claims = Rate(row["claims"], found["keys"])
            parts.append(f"| {name} | {shares} | {row['smallest']:.1e} | {claims} |")
        verdicts = found["verdicts"]
        wrong = {name: v for name, v in verdicts.items() if name != "marked"}
        parts += [
            "",
            f"One key against {len(wrong)} models that do not carry it (the original, "
            f"{sum('with key' in n for n in wrong)} marked with other keys, "
            f"{sum('random' in n for n in wrong)} with random weights): "
            f"{sum(v['marked'] for v in wrong.values())} marked, smallest p {min(v['p'] for v in wrong.values()):.2g}. "
            f"Its own marked model: p = {verdicts['marked']['p']:.1e}, id {verdicts['marked']['id']}.",
            "",
        ]
    path = RESULTS / "verify_little.json"
    if path.exists():
        rows = json.loads(path.read_text())
        parts += [
            "How little is enough: p-value of the marked model, median (worst) over draws of the texts, and how many "
            "draws reach 1e-6:",
            "",
            "| probes | " + " | ".join(f"{t} tokens" for t in (10, 50, 128, 512)) + " |",
            "|---|---|---|---|---|",
        ]
        for count in (1, 3, 10, 100):
            cells = [
                f"{r['median']:.1e} ({r['worst']:.1e}), {r['marked']}/{r['draws']}"
                for r in rows
                if r["probes"] == count
            ]
            parts.append(f"| {count} | " + " | ".join(cells) + " |")
        parts.append("")
    write_section(DOC, "verify_figures.py", parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["nobody", "little", "render"])
    parser.add_argument("--key", type=Path, help="key with profiles; passphrase in PATHMARK_PASSPHRASE")
    parser.add_argument("--marked", type=Path, help="bundled:tiny marked with that key")
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--others", type=int, default=5, help="differently marked models")
    args = parser.parse_args()
    if args.what == "render":
        render()
        return
    key = load_key(args.key, lambda: os.environ["PATHMARK_PASSPHRASE"])
    RESULTS.mkdir(exist_ok=True)
    if args.what == "nobody":
        nobody(key, args.marked, args.keys, args.others)
    else:
        little(key, args.marked)


if __name__ == "__main__":
    main()
