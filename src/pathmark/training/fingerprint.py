"""Which run a checkpoint belongs to."""

from __future__ import annotations

import hashlib
import json
from itertools import chain

import torch
from torch import nn


def run_fingerprint(model: nn.Module, *settings: object) -> str:
    """Names a run by the weights that it starts from and by everything else that decides it, as JSON and hashed.

    Adapters are left out: each process draws its own, and the checkpoint brings those of the run.
    """
    digest = hashlib.sha256(json.dumps(settings).encode())
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if "lora_" not in name:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
