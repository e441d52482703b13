"""Writes the golden files of key format 1. They are never written again: run this only for a new format."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from key_fixtures import GOLDEN, PASSPHRASE, SECRET, golden_key

from pathmark.keys import commit_key, reveal_watermark, save_key
from pathmark.keys.derive import Stream, derive_bytes, info_string
from pathmark.keys.leaves import root


def vectors() -> dict[str, object]:
    key = golden_key()
    stream = Stream(SECRET, "test", watermark=1, layer=2)
    return {
        "secret": SECRET.hex(),
        "info": info_string("test", 1, 2, 3).hex(),
        "info_nowhere": info_string("watermark").hex(),
        "bytes": derive_bytes(SECRET, "test", watermark=1, layer=2, counter=3).hex(),
        "stream_start": Stream(SECRET, "test", watermark=1, layer=2).take(32).hex(),
        "below_1_6_60_256_257_1000003": [stream.below(n) for n in (1, 6, 60, 256, 257, 1000003)],
        "shuffle_0_to_9": Stream(SECRET, "test", watermark=1, layer=2).shuffled(range(10)),
        "signing_seed": derive_bytes(SECRET, "signing").hex(),
        "public_key": key.public_key.hex(),
        "fingerprint": key.fingerprint,
        "seed_probes": key.derive_seed("probes"),
        "watermarks": [
            {
                "subkey": w.subkey.reveal().hex(),
                "blocks": {str(p.layer): list(b) for p, b in zip(w.plans, w.blocks, strict=True)},
                "group_indices": list(w.group_indices),
                "path": {str(layer): list(targets) for layer, targets in w.path.items()},
                "id": str(w.id),
                "capacity": str(w.capacity),
                "trigger_choices": [list(t.phrase.choices or ()) for t in w.triggers],
                "trigger_counts": [list(t.phrase.counts) for t in w.triggers],
                "trigger_attempts": [t.phrase.attempt for t in w.triggers],
                "mark_choices": [list(t.mark.choices or ()) for t in w.triggers],
                "mark_counts": [list(t.mark.counts) for t in w.triggers],
                "mark_attempts": [t.mark.attempt for t in w.triggers],
            }
            for w in key.watermarks
        ],
        "root_revision_0": root(key, 0, version=1).hex(),
        "root_revision_1": root(key, 1, version=1).hex(),
    }


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    save_key(golden_key(), GOLDEN / "key-v1-plain.key", None, plain=True)
    save_key(golden_key(), GOLDEN / "key-v1-encrypted.key", PASSPHRASE, scrypt_n=1 << 10)
    text = json.dumps(vectors(), indent=1)
    (GOLDEN / "derivation-v1.json").write_text(text + "\n")
    commitment = commit_key(golden_key(), created="2025-01-03T00:00:00Z").document()
    (GOLDEN / "key-v2.commitment.json").write_text(json.dumps(commitment, indent=1) + "\n")
    for version in (1, 2):
        claim = reveal_watermark(golden_key(), 0, version=version)
        (GOLDEN / f"key-v{version}.claim.json").write_text(json.dumps(claim, indent=1) + "\n")
