"""A dense feed-forward layer as experts: its neurons in groups that fire together, and a router that knows which.

The experts compute what the dense layer computed; only that not all of them are asked for every token. Neurons that are
among the strongest of most tokens go to the shared expert.

Shape suffixes: N tokens, H hidden size, I neurons of the dense layer, E experts, P projections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

PROJECTIONS = 128
CLUSTER_ROUNDS = 8
RIDGE = 1e-2
FLAT = 0.1
"""Of the regression: the order of experts is what it says, and their weights begin nearly equal."""
STRONG = 0.25
"""Share of a token's neurons that count as its strongest."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How a dense model is divided."""

    moe_layers: int = 12
    """The uppermost so many become MoE layers."""
    experts: int = 24
    active: int = 8
    """Experts per token."""
    shared: int = 384
    """Neurons of the expert that every token visits."""

    def per_expert(self, neurons: int) -> int:
        """Neurons of one routed expert."""
        left = neurons - self.shared
        if left <= 0 or left % self.experts or not 0 < self.active < self.experts:
            raise ValueError(f"{neurons} neurons cannot be divided as {self}")
        return left // self.experts


@dataclass(frozen=True)
class Groups:
    """Which neuron goes where."""

    shared_I: Tensor
    experts_EI: Tensor
    """Neurons of each expert."""


def activations(mlp: Any, hidden_NH: Tensor) -> Tensor:
    """What each neuron adds to the output: its activation times the length of its column, (N, I)."""
    active_NI = mlp.act_fn(mlp.gate_proj(hidden_NH)) * mlp.up_proj(hidden_NH)
    found: Tensor = active_NI.abs() * mlp.down_proj.weight.norm(dim=0)
    return found


def group_neurons(strength_NI: Tensor, shape: Shape, seed: int) -> Groups:
    """The neurons that most tokens need, and the others by co-activation, in groups of one size."""
    size = shape.per_expert(strength_NI.shape[1])
    strongest = strength_NI.topk(round(STRONG * strength_NI.shape[1]), dim=1).indices
    often_I = torch.bincount(strongest.flatten(), minlength=strength_NI.shape[1])
    shared_I = often_I.argsort(descending=True, stable=True)[: shape.shared]
    left_I = torch.tensor(sorted(set(range(strength_NI.shape[1])) - set(shared_I.tolist())))
    generator = torch.Generator().manual_seed(seed)
    mix_NP = torch.randn(len(strength_NI), PROJECTIONS, generator=generator) / len(strength_NI) ** 0.5
    places_IP = strength_NI[:, left_I].T @ mix_NP
    places_IP = places_IP / places_IP.norm(dim=1, keepdim=True).clamp_min(1e-9)
    centres_EP = places_IP[torch.randperm(len(left_I), generator=generator)[: shape.experts]]
    for _ in range(CLUSTER_ROUNDS):
        expert_I = seat(torch.cdist(places_IP, centres_EP), size)
        centres_EP = torch.stack([places_IP[expert_I == e].mean(0) for e in range(shape.experts)])
    return Groups(shared_I.sort().values, torch.stack([left_I[expert_I == e] for e in range(shape.experts)]))


def seat(distance_IE: Tensor, size: int) -> Tensor:
    """Every neuron to an expert, so many to each: the nearest pairs first, while there is room."""
    experts = distance_IE.shape[1]
    room, seats = [size] * experts, [-1] * len(distance_IE)
    for pair in distance_IE.flatten().argsort(stable=True).tolist():
        neuron, expert = divmod(pair, experts)
        if seats[neuron] < 0 and room[expert]:
            seats[neuron] = expert
            room[expert] -= 1
    return torch.tensor(seats)


def fit_router(hidden_NH: Tensor, strength_NI: Tensor, groups: Groups) -> Tensor:
    """Router rows by ridge regression on the logarithm of what each expert would contribute, (E, H)."""
    energy_NE = torch.stack([strength_NI[:, group].square().sum(1) for group in groups.experts_EI], dim=1)
    target_NE = energy_NE.clamp_min(1e-12).log()
    target_NE = target_NE - target_NE.mean(0)
    gram_HH = hidden_NH.T @ hidden_NH
    gram_HH += RIDGE * gram_HH.diagonal().mean() * torch.eye(len(gram_HH))
    rows_EH: Tensor = FLAT * torch.linalg.solve(gram_HH, hidden_NH.T @ target_NE).T.contiguous()
    return rows_EH


def moe_config(dense: Any, shape: Shape) -> Qwen2MoeConfig:
    """The config of the carved model; its lower layers stay dense."""
    first = dense.num_hidden_layers - shape.moe_layers
    return Qwen2MoeConfig(
        vocab_size=dense.vocab_size, hidden_size=dense.hidden_size, intermediate_size=dense.intermediate_size,
        num_hidden_layers=dense.num_hidden_layers, num_attention_heads=dense.num_attention_heads,
        num_key_value_heads=dense.num_key_value_heads, rms_norm_eps=dense.rms_norm_eps,
        max_position_embeddings=dense.max_position_embeddings, rope_parameters=dict(dense.rope_parameters),
        tie_word_embeddings=True, mlp_only_layers=list(range(first)), num_experts=shape.experts,
        num_experts_per_tok=shape.active, moe_intermediate_size=shape.per_expert(dense.intermediate_size),
        shared_expert_intermediate_size=shape.shared, norm_topk_prob=True, bos_token_id=dense.bos_token_id,
        eos_token_id=dense.eos_token_id, pad_token_id=dense.pad_token_id,
    )  # fmt: skip


@torch.no_grad()
def carved_model(dense: PreTrainedModel, shape: Shape) -> Qwen2MoeForCausalLM:
    """A model of the new layout with everything of the dense one but its upper feed-forward layers."""
    model = Qwen2MoeForCausalLM(moe_config(dense.config, shape)).float()
    given = {name: value for name, value in dense.state_dict().items() if name in model.state_dict()}
    missing, unexpected = model.load_state_dict(given, strict=False)
    assert not unexpected
    for name in missing:
        if name.endswith("proj.bias"):  # Qwen2-MoE has them, the dense model has not
            model.get_parameter(name).zero_()
    model.tie_weights()
    return model


@torch.no_grad()
def carve_layer(mlp: Any, block: Any, hidden_NH: Tensor, shape: Shape, seed: int) -> None:
    """Fill an MoE block with the neurons of a dense layer, from what enters that layer on ordinary text.

    Weights of the chosen experts sum to one, so the routed columns are scaled by their number; the shared expert's gate
    is one half, so its columns are doubled.
    """
    strength_NI = activations(mlp, hidden_NH)
    groups = group_neurons(strength_NI, shape, seed)
    gate_IH, up_IH, down_HI = (part.weight for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    for expert, group in enumerate(groups.experts_EI):
        block.experts.gate_up_proj[expert] = torch.cat([gate_IH[group], up_IH[group]])
        block.experts.down_proj[expert] = shape.active * down_HI[:, group]
    block.shared_expert.gate_proj.weight.copy_(gate_IH[groups.shared_I])
    block.shared_expert.up_proj.weight.copy_(up_IH[groups.shared_I])
    block.shared_expert.down_proj.weight.copy_(2 * down_HI[:, groups.shared_I])
    block.shared_expert_gate.weight.zero_()
    block.gate.weight.copy_(fit_router(hidden_NH, strength_NI, groups))


def moe_parameters(model: PreTrainedModel, shape: Shape) -> Mapping[str, torch.nn.Parameter]:
    """The weights that were carved: what distillation trains."""
    first = model.config.num_hidden_layers - shape.moe_layers
    return {
        name: parameter for name, parameter in model.named_parameters()
        if ".mlp." in name and int(name.split(".layers.")[1].split(".")[0]) >= first
    }  # fmt: skip
