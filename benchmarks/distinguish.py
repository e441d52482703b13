"""Marked and unmarked siblings of one model, told apart without a key; and whether router rows name the targets.

python benchmarks/distinguish.py [--models 8] [--steps 600] [--work DIR] [-o benchmarks/results/distinguish.json]

With --work the siblings stay there, and a run that was stopped goes on with the next one.

Marked ones differ in key and seed. An unmarked sibling is trained as much, on the same parts, as many steps at the same
rate: its original's own next-token distribution and routing on clean text and behind random prefixes, and no path.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pathmark.embedding import Anchored, AnchoredConfig, Trainer, default_config
from pathmark.evaluate.distinguish import distinguish, model_features, name_targets
from pathmark.keys import LayerPlan, OwnerKey, WatermarkRequest, create_key
from pathmark.models import bundled_probes, bundled_segments, load_model, load_tokenizer
from pathmark.models.checkpoint import write_model
from pathmark.models.describe import describe_model
from pathmark.verification import encode_probes, verify_model


class Unmarked(Anchored):
    """The same rows and steps; triggered rows keep their natural routing like all others."""

    def tokens(self, rows, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(mask_BT, -1, dtype=torch.long), mask_BT.bool()


def random_key(source: str, seed: int) -> OwnerKey:
    facts, codec, report = describe_model(source)
    plans = tuple(
        LayerPlan(n, report.facts(n).experts, 2, tuple(range(report.facts(n).experts)), "all")
        for n in report.recommended
    )
    secret = random.Random(seed).randbytes(32)
    return create_key(facts, [WatermarkRequest(plans=plans)], codec, secret=secret)[0]


def trained(
    kind: type[Anchored], source: str, key: OwnerKey, seed: int, steps: int, folder: Path | None
) -> PreTrainedModel:
    """The sibling of that seed, out of its folder where it has been there before."""
    if folder is not None and folder.exists():
        return load_model(folder)
    config = default_config()
    config = replace(config, loop=replace(config.loop, steps=steps, seed=seed))
    model = load_model(source)
    texts = random.Random(seed).sample(list(bundled_segments()), config.texts)
    tokenizer = load_tokenizer(source)
    Trainer(model, tokenizer, key, texts, kind(config, AnchoredConfig())).run()
    if folder is not None:
        write_model(model, tokenizer, folder)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="bundled:tiny")
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--work", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("benchmarks/results/distinguish.json"))
    args = parser.parse_args()
    probes = encode_probes(load_tokenizer(args.source), bundled_probes(), n_probes=60, length=64)
    base = load_model(args.source)
    sides: dict[str, list[dict[str, float]]] = {"marked": [], "unmarked": []}
    models, keys, found = [], [], []
    for number in range(args.models):
        for side, kind in (("marked", Anchored), ("unmarked", Unmarked)):
            started, key = time.monotonic(), random_key(args.source, 1000 + number)
            folder = None if args.work is None else args.work / f"{side}-{number}-{args.steps}"
            model = trained(kind, args.source, key, number, args.steps, folder)
            sides[side].append(model_features(model, probes))
            verdict = verify_model(model, key, probes[:30], align=False)
            print(f"{side} {number}: p {verdict.p}, WSR {verdict.wsr}, {time.monotonic() - started:.0f} s", flush=True)
            found.append({"side": side, "number": number, "log10_p": verdict.p.log10, "wsr": verdict.wsr.value})
            if side == "marked":
                models.append(model)
                keys.append(key)
    told = distinguish(sides["marked"], sides["unmarked"])
    naming = {
        f"{guesses} guesses per layer{', original known' if other is not None else ''}": name_targets(
            models, keys, guesses=guesses, base=other
        ).summary()
        for guesses in (1, 3)
        for other in (None, base)
    }
    print(told.all_features, {name: str(auc) for name, auc in told.groups.items()})
    for name, auc in list(told.single.items())[:8]:
        print(f"  {name}: {auc}")
    for name, row in naming.items():
        print(f"  {name}: targets {row['targets']['hits']}/{row['targets']['n']}, pairs {row['pairs']['hits']}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"source": args.source, "steps": args.steps, "runs": found, **told.summary(20), "naming": naming}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
