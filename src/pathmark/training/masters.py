"""What the optimiser works on: 32 bits of exactly the entries that may change.

A parameter in 32 bits that may change as a whole is its own master. Of one in 16 bits there is a wider copy, or small
steps would be rounded away; of one that may change in some rows, such as the targets among a layer's experts, there
are these rows alone, so that the optimiser keeps nothing for the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def changing_rows(mask: Tensor) -> Tensor:
    """Numbers of the rows in which a mask has anything but zeros."""
    return mask.flatten(1).any(dim=1).nonzero()[:, 0]


class Masters:
    """Per name the tensor that the optimiser steps on, and its way from the gradients and back into the model."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], masks: Mapping[str, Tensor]) -> None:
        self.parameters, self._masks = parameters, masks
        self._rows = {name: changing_rows(mask) for name, mask in masks.items()}
        self.tensors: dict[str, nn.Parameter] = {
            name: p if self._is_its_own(name) else nn.Parameter(self.part(name, p.detach()).float().clone())
            for name, p in parameters.items()
        }

    def _is_its_own(self, name: str) -> bool:
        return name not in self._rows and self.parameters[name].dtype == torch.float32

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Of a tensor like the parameter: the rows that may change."""
        return whole[self._rows[name]] if name in self._rows else whole

    @property
    def sizes(self) -> int:
        """Entries that may change."""
        return sum(
            int(self.part(n, m).expand_as(self.tensors[n]).sum())
            if (m := self._masks.get(n)) is not None
            else t.numel()
            for n, t in self.tensors.items()
        )

    def take_gradients(self) -> None:
        """Move the parameters' gradients to their masters."""
        for name, master in self.tensors.items():
            parameter = self.parameters[name]
            if parameter.grad is None or self._is_its_own(name):
                continue
            gradient = self.part(name, parameter.grad).float()
            master.grad = gradient * self.part(name, self._masks[name]) if name in self._masks else gradient
            parameter.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Put the masters' values into the model."""
        for name, master in self.tensors.items():
            if name in self._rows:
                self.parameters[name][self._rows[name]] = master.to(self.parameters[name].dtype)
            elif not self._is_its_own(name):
                self.parameters[name].copy_(master)
