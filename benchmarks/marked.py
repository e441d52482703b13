"""Keys and marked models for measurements on the bundled MoE."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pathmark import __version__
from pathmark.embedding import EmbedConfig, default_config
from pathmark.keys import OwnerKey, load_key, save_key
from pathmark.models import bundled_folder, bundled_probes, bundled_segments
from pathmark.models.checkpoint import base_digest
from pathmark.release.marking import MarkingConfig, Texts, mark_model
from pathmark.release.planning import KeyPlan, plan_key
from pathmark.results import Header
from pathmark.results.header import texts_digest

PASSPHRASE = "benchmarks"  # noqa: S105  of throw-away keys


def bundled_header(
    format: str,
    version: int,
    *,
    settings: Mapping[str, Any],
    key: str | None = None,
    n_probes: int = 100,
    model: Path | None = None,
) -> Header:
    """What is measured on the bundled MoE with the bundled texts: a mixture of two such files is refused."""
    return Header(
        format=format,
        version=version,
        package=__version__,
        torch=torch.__version__,
        model_sha256=None if model is None else base_digest(model),
        original_sha256=base_digest(bundled_folder("bundled:tiny")),
        texts_sha256={"training": texts_digest(bundled_segments()), "probes": texts_digest(bundled_probes())},
        key=key,
        seed=default_config().loop.seed,
        n_probes=n_probes,
        settings=settings,
    )  # fmt: skip


def recipe(name: str) -> EmbedConfig:
    """Named settings; `anchored` is the default of `pathmark embed`."""
    return default_config() if name == "anchored" else default_config("paper")


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
