"""Move the logits of a router while the model runs, whatever the family: its input is moved instead.

Shape suffixes: E experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.errors import AttackError
from pathmark.models import RouterSite

Shift = Callable[[tuple[int, ...]], Tensor]
"""Shape (..., experts) -> what to add to the logits."""


def move_logits(site: RouterSite, shift: Shift) -> None:
    """Add `shift` to a router's logits in every forward pass.

    Logits are z = W h, so W^+ s is added to the router's input: W (h + W^+ s) = z + s exactly where the rows of W are
    independent, and whoever reads the router's input sees it too. Experts get the input as it was.
    """
    site.projection.register_forward_pre_hook(_MovedInput(site, shift), with_kwargs=True)


class _MovedInput:
    """A hook that is copied with its model, random source and all."""

    def __init__(self, site: RouterSite, shift: Shift) -> None:
        weight_EH = site.weight.detach().double()
        experts, hidden = weight_EH.shape
        rank = int(torch.linalg.matrix_rank(weight_EH))
        if rank < experts:
            raise AttackError(
                f"layer {site.layer}: expected {experts} independent router rows of {hidden} entries, got rank {rank}; "
                "its logits cannot be moved by its input"
            )
        # further rows, where there are any, are no routed experts and keep their logits
        self.inverse_HE = torch.linalg.pinv(weight_EH)[:, : site.n_experts].float()
        self.shift = shift

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self.moved(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.moved(kwargs["hidden_states"])}

    def moved(self, hidden: Tensor) -> Tensor:
        """The input whose logits are moved; any leading shape."""
        added = self.shift((*hidden.shape[:-1], self.inverse_HE.shape[1])).to(hidden.device)
        step = torch.nn.functional.linear(added, self.inverse_HE.to(hidden.device))
        return (hidden.float() + step).to(hidden.dtype)


def refuse_to_save(model: PreTrainedModel, what: str) -> None:
    """What happens while a model runs is not in its weights."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AttackError(f"{what} while the model runs and can't be saved; apply it again after loading")

    model.save_pretrained = refuse
