"""Which run a checkpoint belongs to."""

from __future__ import annotations

import hashlib
import json
from itertools import chain

import torch
from torch import nn

from pathmark.models.checkpoint import base_digest
from pathmark.models.streaming import streamed_from
from pathmark.training.parallel import whole


def run_fingerprint(model: nn.Module, *settings: object) -> str:
    """Names a run by the weights that it starts from and by everything else that decides it, as JSON and hashed.

    Adapters are left out: each process draws its own, and the checkpoint brings those of the run. What a streamed model
    leaves on disk is named by its files.
    """
    digest = hashlib.sha256(json.dumps(settings).encode())
    if (folder := streamed_from(model)) is not None:
        digest.update(base_digest(folder).encode())
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if "lora_" not in name:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if "lora_" not in name and not tensor.is_meta:
            digest.update(whole(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
