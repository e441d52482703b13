"""Small models marked in a few seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pathmark.embed import default_config
from pathmark.evaluate import ScanConfig
from pathmark.evaluate.marking import mark_model
from pathmark.keys import OwnerKey
from pathmark.models import bundled_probes, bundled_segments

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
    config = default_config()
    config = replace(
        config,
        data=replace(config.data, seq_len=32, short_len=None, long_factor=1),
        loop=replace(config.loop, steps=60, lr=5e-3, check_every=1000),
        texts=40,
        batch_size=12,
    )
    scan = ScanConfig(random_sequences=5, substitutions=5, shuffles=2)
    return mark_model(str(base), key, out, bundled_segments(), bundled_probes(), config, n_probes=20, scan=scan).key
