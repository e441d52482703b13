"""What verification needs to recognise experts, attached to a key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from pathmark.keys import OwnerKey
from pathmark.models.original import attachments_of
from pathmark.models.sketches import expert_sketches, pack_arrays, pack_profiles, routing_profiles


def attach_profiles(key: OwnerKey, model: nn.Module, probes: Sequence[Sequence[int]]) -> OwnerKey:
    """The key with probes, expert sketches and clean-routing profiles of a model; unchanged parts stay as they are.

    Take them from the original, before anything is embedded. What training leaves in a marked model depends on the
    targets; a matching built on that would too, and the exact test would no longer be exact.
    """
    layers = list(key.layers)
    sketches = {name: array.astype("float16") for name, array in expert_sketches(model, layers).items()}
    records = {
        "probes.json": json.dumps([list(row) for row in probes]).encode(),
        "profiles.npz": pack_profiles(routing_profiles(model, probes, layers)),
        "sketches.npz": pack_arrays(sketches),
    }
    return _attached(key, records)


def attach_original(key: OwnerKey, model: PreTrainedModel, tokenizer: Any, probes: Sequence[Sequence[int]]) -> OwnerKey:
    """The key with the original's config, vocabulary and fluency: what a thief may break around the same weights."""
    return _attached(key, attachments_of(model, tokenizer, probes))


def _attached(key: OwnerKey, records: dict[str, bytes]) -> OwnerKey:
    for name, data in records.items():
        if key.attachments.get(name) != data:
            key = key.attach(name, data)
    return key
