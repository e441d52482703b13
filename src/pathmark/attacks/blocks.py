"""A thief's view of an MoE layer: which tensors hold the experts, and how to change their number.

Everything here is read from tensor shapes; a layout that is not known is refused, because an attack that
misses one tensor measures nothing.

Shape suffixes: E experts, H hidden size, I neurons of an expert, G gate and up rows together (2 I).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.errors import ModelError
from pathmark.models import RouterSite, find_routers

COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names under which configs and modules keep the number of routed experts."""
BIAS_NAMES = ("e_score_correction_bias", "expert_bias", "balancing_biases", "bias")
"""One number per expert that takes part in the choice; on the router or on the block around it."""
SHARED_NAMES = ("shared_expert", "shared_experts", "shared_mlp")


@dataclass(frozen=True, eq=False)
class MoeBlock:
    """One MoE layer whose experts are the fused tensors gate_up_proj (E, G, H) and down_proj (E, H, I)."""

    site: RouterSite
    block: nn.Module
    """The module around router and experts."""
    experts: nn.Module

    @property
    def gate_up_EGH(self) -> Tensor:
        """Gate rows, then up rows, of every expert."""
        return _tensor(self.experts, "gate_up_proj")

    @property
    def down_EHI(self) -> Tensor:
        """What each neuron writes to the residual stream."""
        return _tensor(self.experts, "down_proj")

    @property
    def shared(self) -> list[nn.Module]:
        """Gated MLPs that every token visits."""
        found = [getattr(self.block, name, None) for name in SHARED_NAMES]
        return [mlp for mlp in found if isinstance(mlp, nn.Module) and is_gated_mlp(mlp)]

    def per_expert(self) -> list[tuple[nn.Module, str]]:
        """(owner, name) of every tensor with one entry per expert: router rows, biases, expert weights."""
        count, site = self.site.n_experts, self.site
        found: dict[int, tuple[nn.Module, str]] = {}
        for owner, names in (
            (site.projection, ("weight", *BIAS_NAMES)),
            (site.router, BIAS_NAMES),
            (self.block, BIAS_NAMES),
            (self.experts, tuple(name for name, _ in self.experts.named_parameters(recurse=False))),
        ):
            for name in names:
                tensor = getattr(owner, name, None)
                if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[0] == count:
                    found[id(tensor)] = (owner, name)
        return list(found.values())

    def groups(self) -> int:
        """Groups of consecutive experts that the router limits its choice to; 1 without such a limit."""
        if not self.site.group_limited:
            return 1
        names = ("num_group", "n_group")
        return next(int(getattr(self.site.router, n)) for n in names if getattr(self.site.router, n, None))


def moe_blocks(model: PreTrainedModel) -> list[MoeBlock]:
    """Every MoE layer of the model, or a refusal that names the first one with another layout."""
    blocks = []
    for site in find_routers(model):
        block = model.get_submodule(site.name.rpartition(".")[0])
        experts, hidden = site.experts, site.weight.shape[1]
        gate_up = getattr(experts, "gate_up_proj", None)
        down = getattr(experts, "down_proj", None)
        if (
            not isinstance(gate_up, Tensor)
            or not isinstance(down, Tensor)
            or gate_up.ndim != 3
            or gate_up.shape[0] != site.n_experts
            or gate_up.shape[2] != hidden
            or tuple(down.shape) != (site.n_experts, hidden, gate_up.shape[1] // 2)
        ):
            raise ModelError(
                f"{type(model).__name__}, layer {site.layer}: expected experts as fused gate_up_proj and down_proj "
                "(mixtral, qwen2_moe, qwen3_moe, olmoe, deepseek_v3 and the like); this attack knows no other layout"
            )
        assert experts is not None
        blocks.append(MoeBlock(site, block, experts))
    return blocks


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether a module computes down(act(gate(x)) * up(x)) with Linear layers of the usual names."""
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj"))


def gated_mlps(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Shared experts and dense layers: every gated MLP outside the fused experts."""
    yield from (module for module in model.modules() if is_gated_mlp(module))


def copied(model: PreTrainedModel) -> PreTrainedModel:
    """A copy to work on: attacks never change the model they are given."""
    return copy.deepcopy(model)


def replace_tensor(owner: nn.Module, name: str, value: Tensor) -> None:
    """Put another tensor, of whatever shape, in the place of a parameter or buffer."""
    old = getattr(owner, name)
    value = value.detach().to(old.dtype).clone()
    if isinstance(old, nn.Parameter):
        setattr(owner, name, nn.Parameter(value, requires_grad=old.requires_grad))
    else:
        setattr(owner, name, value)


@torch.no_grad()
def reindex_experts(block: MoeBlock, order: Tensor) -> None:
    """Expert i of the layer becomes what expert order[i] was, in every tensor; `order` may be of any length."""
    for owner, name in block.per_expert():
        replace_tensor(owner, name, getattr(owner, name)[order])


def set_expert_count(model: PreTrainedModel, count: int) -> None:
    """Tell the config and every module of the MoE layers how many routed experts there are."""
    for block in moe_blocks(model):  # counts its experts by tensors, so it holds before the numbers follow
        for module in (block.block, block.site.router, block.experts):
            _set_existing(module, count)
    _set_existing(model.config, count)


def _set_existing(owner: Any, count: int) -> None:
    for name in COUNT_NAMES:
        if isinstance(getattr(owner, name, None), int):
            setattr(owner, name, count)


def _tensor(owner: nn.Module, name: str) -> Tensor:
    tensor = getattr(owner, name)
    assert isinstance(tensor, Tensor)
    return tensor
