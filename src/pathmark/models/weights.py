"""Weights that cannot be judged: NaN and inf."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pathmark.errors import ModelError


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or inf. By the extremes, which needs no second tensor of that size."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(low) & torch.isfinite(high))


def refuse_bad_weights(model: nn.Module) -> None:
    """Raise ModelError for a model with NaN or inf in a parameter or buffer that it loads.

    A streamed model has none of its layers in memory; it is checked layer by layer as they are read.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        computed = leaf in model.get_submodule(owner)._non_persistent_buffers_set
        if not tensor.is_meta and not computed and not is_finite(tensor):
            raise ModelError(f"{name} holds NaN or inf; expected finite weights. No verdict on such a model")
