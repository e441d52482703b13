"""One training run over several processes: every process has the whole model (DDP) or a shard of its layers (FSDP2).

A step's rows are shared out; what comes out at the top is gathered, so that the loss is that of all rows, to the digit
that sums of floats allow, whatever its form. Gradients come back to each process's own rows and are averaged over
processes by torch. docs/planning.md says how to start it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pathmark.errors import RanksError
from pathmark.models.ranks import world
from pathmark.models.routers import find_routers
from pathmark.models.upper import layer_stack

Wrapper = Literal["none", "ddp", "fsdp"]


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its entries, wherever they are; every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mine(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def sharded_layers(model: nn.Module) -> Iterator[None]:
    """Inside the block every process holds a shard of each decoder layer; after it, all of the weights as they are."""
    layers = list(layer_stack(model, find_routers(model)[0]))
    classes = {layer: (type(layer), set(vars(layer))) for layer in layers}
    mesh = init_device_mesh(next(model.parameters()).device.type, (world(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, ignored_params=_of_another_type(layer))
    _require_shards(layers)
    yield  # where a run fails, others may be gone: nothing is gathered, and the model is of no further use
    for layer in layers:
        _unwrap(layer, *classes[layer])


def _of_another_type(layer: nn.Module) -> set[nn.Parameter]:
    """Weights of another type than most of a layer's, as routers in 32 bits are: they are few, and torch shards those
    of one type alone."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in layer.parameters():
        sizes[parameter.dtype] += parameter.numel()
    ((usual, _),) = sizes.most_common(1)
    return {parameter for parameter in layer.parameters() if parameter.dtype != usual}


def _require_shards(layers: list[nn.Module]) -> None:
    """A wrapper that shards nothing would only look like one."""
    for layer in layers:
        to_shard = set(layer.parameters()) - _of_another_type(layer)
        held = sum(mine(p).numel() for p in to_shard)
        needed = sum(p.numel() for p in to_shard)
        if not all(isinstance(p, DTensor) for p in to_shard) or not held < needed:
            raise RanksError(f"expected a shard of each layer per process, got {held:,} of {needed:,} parameters")


def _unwrap(layer: Any, kind: type[nn.Module], had: set[str]) -> None:
    """The plain layer again. torch has no way back of its own, so its hooks are removed by hand."""
    layer.reshard()
    full = {name: (whole(p.detach()), p.requires_grad) for name, p in layer.named_parameters()}
    state = layer._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    layer.__class__ = kind
    for name in set(vars(layer)) - had:  # torch's own notes, which hold the group of processes: no copy could be made
        del vars(layer)[name]
    for module in layer.modules():
        module._state_dict_pre_hooks.clear()
        module._load_state_dict_pre_hooks.clear()
    for name, (value, trainable) in full.items():
        owner, _, leaf = name.rpartition(".")
        layer.get_submodule(owner)._parameters[leaf] = nn.Parameter(value.clone(), requires_grad=trainable)


class _Call(nn.Module):
    """A function of a model as a module, so that DDP sees what goes through it."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self._function = model, function

    def forward(self, *args: Any) -> Any:
        return self._function(*args)


def through(
    model: nn.Module, function: Callable[..., Any], wrapper: Wrapper, outside: Collection[str] = ()
) -> Callable[..., Any]:
    """A function that runs the model, such that gradients of its parameters are averaged over processes.

    `outside` names those that are used outside of this function: of their gradients DDP can know nothing.
    """
    if wrapper != "ddp":
        return function
    device, call = next(model.parameters()).device, _Call(model, function)
    ids = [device.index] if device.type == "cuda" else None
    ignored = [f"model.{name}" for name in outside]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(call, ignored)  # type: ignore[no-untyped-call]
    wrapped = DistributedDataParallel(call, device_ids=ids, forward_sync_buffers=False, find_unused_parameters=True)
    return wrapped


def not_averaged(
    parameters: Mapping[str, nn.Parameter], wrapper: Wrapper, outside: Collection[str] = ()
) -> Collection[str]:
    """Names of those parameters whose gradients the wrapper does not average over processes."""
    if wrapper == "fsdp":
        return [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]
    return outside if wrapper == "ddp" else ()


def require_world(wrapper: Wrapper) -> None:
    """Several processes need a wrapper, and a wrapper several processes."""
    if (wrapper == "none") != (world() == 1):
        raise RanksError(
            f"{world()} processes and --parallel {wrapper}: start several with torchrun and choose ddp or fsdp, or one "
            "process and none"
        )
