"""What the optimiser works on: 32 bits of exactly the entries that may change, and that this process holds.

A parameter in 32 bits that may change as a whole is its own master. Of one in 16 bits there is a wider copy, or small
steps would be rounded away; of one that may change in some rows, such as the targets among a layer's experts, there
are these rows alone, so that the optimiser keeps nothing for the others. Of a parameter that is sharded over processes
all of this holds for the shard.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from types import EllipsisType
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pathmark.models.ranks import summed, world
from pathmark.training.parallel import mine

Rows: TypeAlias = slice | EllipsisType
"""Neighbouring rows of a tensor, or all that there is of it."""


def changing_rows(mask: Tensor) -> Tensor:
    """Numbers of the rows in which a mask has anything but zeros."""
    return mask.flatten(1).any(dim=1).nonzero()[:, 0]


class Masters:
    """Per name the tensor that the optimiser steps on, and its way from the gradients and back into the model."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], masks: Mapping[str, Tensor], not_averaged: Collection[str] = ()
    ) -> None:
        """`not_averaged` names parameters of which every process has a gradient of its own."""
        self.parameters, self._not_averaged = parameters, set(not_averaged)
        self._all_rows = {name: changing_rows(mask) for name, mask in masks.items()}
        self._held = {name: _held_rows(p) for name, p in parameters.items()}
        self._sharded = any(isinstance(p, DTensor) for p in parameters.values())
        self._rows = {name: self._here(name) for name in masks}
        self._masks = {n: self._cut(n, m)[self._rows[n]] for n, m in masks.items()}
        self.size = sum(
            int(masks[n].expand_as(p).sum()) if n in masks else p.numel() for n, p in parameters.items()
        )  # of all processes
        self.tensors: dict[str, nn.Parameter] = {}
        for name, parameter in parameters.items():
            held = mine(parameter.detach())
            if self._is_its_own(name):  # for a shard: another name for the same memory
                self.tensors[name] = nn.Parameter(held) if isinstance(parameter, DTensor) else parameter
            else:
                self.tensors[name] = nn.Parameter(self._part(name, held).float().clone())

    def _is_its_own(self, name: str) -> bool:
        return name not in self._rows and self.parameters[name].dtype == torch.float32

    def _cut(self, name: str, values: Tensor) -> Tensor:
        """Of values like the whole parameter: the rows that this process holds."""
        first, count = self._held[name]
        return values if first is None else values[first : first + count]

    def _here(self, name: str) -> Tensor:
        """Rows that may change, by their numbers in what this process holds."""
        first, count = self._held[name]
        rows = self._all_rows[name]
        return rows if first is None else rows[(rows >= first) & (rows < first + count)] - first

    def _part(self, name: str, held: Tensor) -> Tensor:
        return held[self._rows[name]] if name in self._rows else held

    def rows(self, name: str) -> Rows:
        """Of all rows of a parameter that may change: those that this process has."""
        first, count = self._held[name]
        if first is None:
            return ...
        if name in self._rows:
            first, count = int((self._all_rows[name] < first).sum()), len(self._rows[name])
        return slice(first, first + count)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of all that may change of a parameter, over all processes."""
        shape = tuple(self.parameters[name].shape)
        return (len(self._all_rows[name]), *shape[1:]) if name in self._all_rows else shape

    def take_gradients(self) -> None:
        """Move the parameters' gradients to their masters."""
        for name, master in self.tensors.items():
            parameter = self.parameters[name]
            if name in self._not_averaged and parameter.grad is not None:
                parameter.grad = summed(parameter.grad) / world()
            if parameter.grad is None or master is parameter:
                continue
            gradient = self._part(name, mine(parameter.grad)).float()
            master.grad = gradient * self._masks[name] if name in self._masks else gradient
            parameter.grad = None

    def clip(self, most: float) -> None:
        """Scale all gradients down to this norm over all processes, if they have a larger one."""
        if not self._sharded:
            torch.nn.utils.clip_grad_norm_(self.tensors.values(), most)
            return
        squares = {name: m.grad.pow(2).sum() for name, m in self.tensors.items() if m.grad is not None}
        apart = [square for name, square in squares.items() if self._held[name][0] is not None]
        total = sum((float(square) for name, square in squares.items() if self._held[name][0] is None), 0.0)
        total += float(summed(torch.tensor(float(sum(map(float, apart))), dtype=torch.float64)))
        factor = min(1.0, most / (math.sqrt(total) + 1e-6))
        for master in self.tensors.values():
            if master.grad is not None:
                master.grad.mul_(factor)

    @torch.no_grad()
    def write_back(self) -> None:
        """Put the masters' values into the model."""
        for name, master in self.tensors.items():
            held = mine(self.parameters[name])
            if name in self._rows:
                held[self._rows[name]] = master.to(held.dtype)
            elif not self._is_its_own(name):
                held.copy_(master)


def _held_rows(parameter: Tensor) -> tuple[int | None, int]:
    """(first row, rows) of a sharded parameter's part here; first None for one that is whole."""
    if not isinstance(parameter, DTensor):
        return None, len(parameter) if parameter.ndim else 1
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(offset[0]), int(shape[0])
