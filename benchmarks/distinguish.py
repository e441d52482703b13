"""Marked and unmarked siblings of one model, told apart without a key; and whether router rows name the targets.

python benchmarks/distinguish.py --work DIR [--models 8]      # resumes; two may share DIR

Marked ones differ in key and seed; keys are drawn at random. An unmarked sibling is trained as much, on the same parts,
as many steps at the same rate: its original's own next-token distribution and routing on clean text and behind random
prefixes, and no path.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marked import PASSPHRASE, bundled_header
from pathmark.embedding import Anchored, AnchoredConfig, Trainer, default_config
from pathmark.evaluate.distinguish import distinguish, model_features, name_targets
from pathmark.keys import load_key, save_key
from pathmark.models import bundled_probes, bundled_segments, load_model, load_tokenizer
from pathmark.models.checkpoint import write_model
from pathmark.release.planning import KeyPlan, plan_key
from pathmark.results import Header, write_result
from pathmark.verification import encode_probes, verify_model

FORMAT, VERSION = "pathmark-distinguish", 1
RESULT = Path(__file__).parent / "results" / "distinguish.json"
N_PROBES = 60


class Unmarked(Anchored):
    """The same rows and steps; triggered rows keep their natural routing like all others."""

    def tokens(self, rows, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        return torch.full_like(mask_BT, -1, dtype=torch.long), mask_BT.bool()


@dataclass(frozen=True, kw_only=True)
class Sibling:
    """One model; both kinds are read with a key, which only one of them carries."""

    marked: bool
    key: str
    seed: int
    log10_p: float
    wsr: float


@dataclass(frozen=True, kw_only=True)
class DistinguishResult:
    """How well the two kinds are told apart, and what router rows give away."""

    header: Header
    siblings: tuple[Sibling, ...]
    told_apart: Mapping[str, Any]
    """`all`, `groups` and `single`: areas under the curve with their intervals."""
    naming: Mapping[str, Any]
    """Targets, pairs and layers that router rows name, by what the thief has."""


def make(folder: Path, marked: bool, seed: int) -> None:
    """One sibling with its key; a folder that is there is somebody's."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return
    config = default_config()
    config = replace(config, loop=replace(config.loop, seed=seed))
    key = plan_key("bundled:tiny", KeyPlan())[0]
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    kind = Anchored if marked else Unmarked
    Trainer(model, tokenizer, key, bundled_segments(), kind(config, AnchoredConfig())).run()
    save_key(key, folder / "owner.key", PASSPHRASE)
    write_model(model, tokenizer, folder / "model")
    print(folder.name, flush=True)


def measure(work: Path, count: int) -> DistinguishResult:
    """Everything from the finished folders."""
    probes = encode_probes(load_tokenizer("bundled:tiny"), bundled_probes(), n_probes=N_PROBES, length=64)
    features: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    siblings, models, keys = [], [], []
    for seed in range(count):
        for marked in (True, False):
            folder = work / f"{'marked' if marked else 'unmarked'}-{seed}"
            model, key = load_model(folder / "model").eval(), load_key(folder / "owner.key", PASSPHRASE)
            features[marked].append(model_features(model, probes))
            verdict = verify_model(model, key, probes[:30], align=False)
            siblings.append(Sibling(
                marked=marked, key=key.fingerprint, seed=seed, log10_p=verdict.p.log10, wsr=verdict.wsr.value
            ))  # fmt: skip
            if marked:
                models.append(model)
                keys.append(key)
    original = load_model("bundled:tiny")
    return DistinguishResult(
        header=bundled_header(
            FORMAT, VERSION, n_probes=N_PROBES, settings={"config": repr(default_config()), "models": count}
        ),
        siblings=tuple(siblings),
        told_apart=distinguish(features[True], features[False]).summary(20),
        naming={
            f"{guesses} guesses per layer{', original known' if base is not None else ''}": name_targets(
                models, keys, guesses=guesses, base=base
            ).summary()
            for guesses in (1, 3) for base in (None, original)
        },
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    for seed in range(args.models):
        for marked in (True, False):
            make(args.work / f"{'marked' if marked else 'unmarked'}-{seed}", marked, seed)
    if unfinished := [path.name for path in args.work.iterdir() if not (path / "model").exists()]:
        raise SystemExit(f"another run is at work on {', '.join(unfinished)}; run again when it is done")
    result = measure(args.work, args.models)
    write_result(RESULT, result)
    RESULT.chmod(0o644)
    print(result.told_apart["all"], result.told_apart["groups"], result.naming)


if __name__ == "__main__":
    main()
