"""Small models marked in a few seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embed_helpers import quick_config

from pathmark.keys import OwnerKey
from pathmark.release import ScanConfig
from pathmark.release.marking import MarkingConfig, Texts, mark_model
from pathmark.verification import Anchor

PASSPHRASE = "of the tests"


@dataclass(frozen=True)
class Case:
    """A model before and after, and the key that was embedded."""

    base: Path
    marked: Path
    key: OwnerKey
    key_file: Path


def mark_quickly(base: Path, key: OwnerKey, out: Path) -> OwnerKey:
    """Embed with few steps; enough for the exact test. Returns the key with its profiles."""
    config = quick_config(data={"short_len": None, "long_factor": 1})
    scan = ScanConfig(random_sequences=5, per_count=2)
    marking = MarkingConfig(embedding=config, n_probes=20, scan=scan)
    return mark_model(str(base), key, out, Texts.bundled(), marking).key


def dated(key: OwnerKey, revision: int | None = None) -> Anchor:
    """An anchor as a trusted timestamp over the commitment of this revision gives it."""
    at = key.revision if revision is None else revision
    return Anchor(True, "dated", 80, {name: entry.digest for name, entry in key.attachments_at(at).items()})


class Told:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None]] = []
        self.done = 0

    def stage(self, name: str, total: int | None) -> None:
        """A stage begins."""
        self.stages.append((name, total))

    def advance(self, units: int, note: str = "") -> None:
        """Some units are done."""
        self.done += units
