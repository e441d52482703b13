"""The small MoE and the texts that ship with the package."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

from pathmark.errors import ModelError

BUNDLED_PREFIX = "bundled:"
_FOLDER = Path(__file__).parent.parent / "bundled"


def bundled_folder(name: str) -> Path:
    """Folder of `bundled:NAME`."""
    folder = _FOLDER / name.removeprefix(BUNDLED_PREFIX)
    if not name.removeprefix(BUNDLED_PREFIX).isalnum() or not (folder / "config.json").is_file():
        have = sorted(p.name for p in _FOLDER.iterdir() if (p / "config.json").is_file())
        raise ModelError(f"{name} is not bundled; expected one of {', '.join(BUNDLED_PREFIX + n for n in have)}")
    return folder


@cache
def bundled_segments() -> tuple[str, ...]:
    """About 3,000 training segments of the bundled model, of 128 tokens and more: the text for embedding."""
    return _read("segments.jsonl.gz")


@cache
def bundled_probes() -> tuple[str, ...]:
    """Held-out passages of 512 tokens and more, from documents the bundled model was not trained on."""
    return _read("probes.jsonl.gz")


def _read(name: str) -> tuple[str, ...]:
    with gzip.open(_FOLDER / name, "rt", encoding="utf-8") as stream:
        return tuple(json.loads(line)["text"] for line in stream)
