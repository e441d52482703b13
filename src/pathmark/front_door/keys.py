"""Keys at the front door: an object or a file, and its public figures. Light: no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pathmark.keys import OwnerKey, Watermark, load_key
from pathmark.keys.evidence import bits
from pathmark.keys.keyfile import PassphraseSource

KeyLike = OwnerKey | str | os.PathLike[str]
"""A key, or the file that holds it."""


def open_key(key: KeyLike, passphrase: PassphraseSource = None) -> OwnerKey:
    """The key itself, or the one in a file; None asks for PATHMARK_PASSPHRASE."""
    return key if isinstance(key, OwnerKey) else load_key(os.fspath(key), passphrase)


def key_file(key: KeyLike) -> Path | None:
    """Where a key is kept, if it was given as a file."""
    return None if isinstance(key, OwnerKey) else Path(key)


def describe_key(key: OwnerKey) -> dict[str, Any]:
    """Figures of a key that may be shown."""
    return {
        "fingerprint": key.fingerprint,
        "owner": key.owner,
        "created": key.created,
        "revision": key.revision,
        "model": {
            "architecture": key.model.architecture,
            "model_type": key.model.model_type,
            "layers": key.model.num_layers,
            "vocabulary": key.model.vocab_size,
        },
        "watermarks": [_describe_watermark(mark) for mark in key.watermarks],
        "attachments": {name: len(data) for name, data in key.attachments.items()},
    }


def _describe_watermark(mark: Watermark) -> dict[str, Any]:
    trigger, reply = mark.triggers[0].bits, mark.triggers[0].mark.bits
    secret = mark.triggers[0].secret_bits
    return {
        "watermark": mark.index,
        "layers": list(mark.layers),
        "widths": [plan.width for plan in mark.plans],
        "pool_sizes": [len(plan.pool) for plan in mark.plans],
        "pool_rule": mark.plans[0].rule,
        "groups": list(mark.code.radices),
        "id": mark.id,
        "ids": mark.capacity,
        "id_bits": round(bits(mark.capacity), 2),
        "redundancy": mark.redundancy,
        "evidence_bits": round(bits(mark.path_count), 2),
        "evidence_bits_after_erasures": [round(bits(mark.paths_after_erasures(n)), 2) for n in (1, 2)],
        "triggers": len(mark.triggers),
        "trigger_tokens": len(mark.triggers[0].tokens),
        "trigger_bits": None if trigger is None else round(trigger, 2),
        "trigger_secret_bits": None if secret is None else round(secret, 2),
        "mark_bits": None if reply is None else round(reply, 2),
    }
