"""Keys and marked models for measurements on the bundled MoE."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

from pathmark.embedding import EmbedConfig, default_config
from pathmark.keys import OwnerKey, load_key, save_key
from pathmark.release.marking import MarkingConfig, Texts, mark_model
from pathmark.release.planning import KeyPlan, plan_key

PASSPHRASE = "benchmarks"  # noqa: S105  of throw-away keys


def recipe(name: str) -> EmbedConfig:
    """Named settings; `anchored` is the default of `pathmark embed`."""
    paper = default_config("paper")
    return {
        "anchored": default_config(),
        "paper-router": replace(paper, train="router"),
        "paper-router-attention": replace(paper, train="router+attention"),
    }[name]


def fixed_key(seed: int, plan: KeyPlan | None = None) -> OwnerKey:
    """A key from a fixed secret, for measurements that no key decides; nobody should use it for anything else."""
    return plan_key("bundled:tiny", plan or KeyPlan(), secret=random.Random(f"benchmarks {seed}").randbytes(32))[0]


def mark(name: str, folder: Path, key: OwnerKey, seed: int = 0) -> OwnerKey:
    """Mark the bundled model into `folder`/paths, with its self-check beside; what is there is not repeated."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "paths.json").exists():
        config = recipe(name)
        config = replace(config, loop=replace(config.loop, seed=seed))
        marked = mark_model("bundled:tiny", key, folder / "paths", Texts.bundled(), MarkingConfig(embedding=config))
        save_key(marked.key, folder / "owner.key", PASSPHRASE)
        (folder / "paths.json").write_text(json.dumps(marked.summary(), indent=1) + "\n")
        print(json.dumps(marked.summary()), flush=True)
    return load_key(folder / "owner.key", PASSPHRASE)
