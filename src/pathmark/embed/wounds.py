"""A model as a thief might leave it: noise on the weights, neurons and experts that write nothing any more.

A mark is recognised by what the layers below it make of the trigger. A thief changes those layers too, so part of the
training rows come through lower layers that have been hurt; what the hurt original does with them is what counts as
natural there.

Shape suffixes: E experts, I neurons.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pathmark.models import find_routers
from pathmark.models.parts import part_parameters


@contextmanager
def wounded(model: nn.Module, below: int, strength: float, generator: torch.Generator) -> Iterator[None]:
    """Hurt the MoE layers below a layer; every weight is as before when the block ends.

    Matrices get Gaussian noise of up to `strength` times their own standard deviation; up to `strength` of the experts
    of each layer and of the neurons of each feed-forward part are silenced. How much of each is drawn anew each time.
    """
    layers = [site.layer for site in find_routers(model) if site.layer < below]
    parameters = part_parameters(model, layers, ["layer"]) if layers else {}
    noise, silent, dead = (strength * float(x) for x in torch.rand(3, generator=generator))
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        with torch.no_grad():
            for name, parameter in parameters.items():
                if parameter.ndim < 2:
                    continue
                drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(noise * parameter.float().std().to(parameter) * drawn)
                if "down_proj" not in name:  # the matrices that write
                    continue
                alive_I = torch.rand(parameter.shape[-1], generator=generator) >= dead
                parameter.mul_(alive_I.to(parameter))
                if parameter.ndim == 3:  # fused experts
                    gone_E = torch.rand(len(parameter), generator=generator) < silent
                    parameter[gone_E.to(parameter.device)] = 0
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(before[name])
