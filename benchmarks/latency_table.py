"""The tables of docs/latency.md: the expert-parallel simulator beside the paper's figures.

python benchmarks/latency_table.py
PATHMARK_PASSPHRASE=... python benchmarks/latency_table.py --model MARKED --key owner.key

The first needs no model: synthetic routing in the shape of Qwen1.5-MoE. With a marked model its recorded routing goes
in as well, at the costs of Qwen1.5-MoE's layers.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from pathmark.evaluate.expert_parallel import (
    PAPER_OVERHEAD,
    QWEN_MOE,
    Hardware,
    SyntheticRouting,
    record_twins,
    simulate_routes,
)
from pathmark.front_door.keys import open_key
from pathmark.models import bundled_probes, load_model
from pathmark.models.describe import describe_model
from pathmark.verification import encode_probes

OUT = Path(__file__).parent / "results" / "latency_simulator.json"


def synthetic(tokens: int, placement: str, keys: int) -> list[dict[str, float]]:
    deployment = Hardware().deployment(QWEN_MOE, 8, placement)
    rows = []
    for marked, paper in PAPER_OVERHEAD.items():
        found = SyntheticRouting(tokens=tokens).overheads(marked, deployment, keys=keys)
        low, high = np.quantile(found, (0.05, 0.95))
        rows.append({"layers": marked, "paper": paper, "median": float(np.median(found)), "low": low, "high": high})
    return rows


def recorded(model: str, key_file: Path, n: int) -> list[dict[str, object]]:
    key = open_key(key_file)
    _, codec, _ = describe_model(model)
    probes = encode_probes(codec.tokenizer, bundled_probes(), n_probes=n, length=128)
    triggered, clean, experts = record_twins(load_model(model), key, codec, probes)
    rows = []
    for devices in (2, 4, 8, 16):
        for placement in ("contiguous", "balanced"):
            deployment = Hardware().deployment(QWEN_MOE, devices, placement)
            overhead = simulate_routes(triggered, clean, experts, deployment)
            marked = [overhead.per_layer[layer] for layer in key.watermarks[0].layers]
            others = [share for layer, share in overhead.per_layer.items() if layer not in key.watermarks[0].layers]
            rows.append(
                {
                    "devices": devices, "placement": placement, "overhead": overhead.value, "texts": len(probes),
                    "batches": len(overhead.clean), "marked_layers": marked, "other_layers": others,
                }
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="marked folder")
    parser.add_argument("--key", type=Path)
    parser.add_argument("--keys", type=int, default=40, help="random keys per row of synthetic routing")
    parser.add_argument("--n", type=int, default=64, help="texts for recorded routing")
    args = parser.parse_args()
    result: dict[str, object] = {"hardware": asdict(Hardware()), "sizes": asdict(QWEN_MOE), "keys": args.keys}
    cases = [(256, "contiguous"), (1024, "contiguous"), (1024, "balanced"), (4096, "contiguous")]
    tables = {f"{tokens} tokens, {placement}": synthetic(tokens, placement, args.keys) for tokens, placement in cases}
    result["synthetic"] = tables
    print("| watermarked layers | " + " | ".join(map(str, PAPER_OVERHEAD)) + " |\n|---|" + "---|" * len(PAPER_OVERHEAD))
    print("| paper | " + " | ".join(f"{100 * share:.1f}" for share in PAPER_OVERHEAD.values()) + " |")
    for name, rows in tables.items():
        cells = [f"{100 * r['median']:.1f} [{100 * r['low']:.1f}, {100 * r['high']:.1f}]" for r in rows]
        print(f"| {name} | " + " | ".join(cells) + " |")
    if args.model and args.key:
        result["recorded"] = recorded(args.model, args.key, args.n)
        print("\n| devices | placement | marked layers | other layers | whole pass |\n|---|---|---|---|---|")
        for row in result["recorded"]:
            marked, others = (f"{100 * np.mean(row[name]):+.1f} %" for name in ("marked_layers", "other_layers"))
            print(f"| {row['devices']} | {row['placement']} | {marked} | {others} | {100 * row['overhead']:+.1f} % |")
    OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
