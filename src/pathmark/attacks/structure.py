"""Changes of a model's inside that leave its outputs as they are, or nearly: what a thief does to hide a copy.

Each is model in, model out; the model that goes in is not touched. The adversary holds the weights and knows
the architecture. It needs no data, no trigger and no key, and nothing here costs more than reading the
weights once. `pathmark.attacks.surgery` has the changes that do cost quality.

Shape suffixes: E experts, H hidden size, I neurons of an expert, G gate and up rows together (2 I).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.attacks.attack import option
from pathmark.attacks.blocks import copied, gated_mlps, is_gated_mlp, moe_blocks, reindex_experts
from pathmark.attacks.kit import Kit
from pathmark.errors import ModelError
from pathmark.models import Scoring
from pathmark.models.upper import body

ROTATABLE = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Pre-norm decoders whose every reader and writer of the residual stream is known by name."""


@dataclass(frozen=True, kw_only=True)
class PermuteExperts:
    """Renumber the experts of every layer."""

    seed: int = option(0, "Seed of everything that is drawn.")


@dataclass(frozen=True, kw_only=True)
class ShiftRouters:
    """Add one random vector to all router rows of a layer."""

    seed: int = option(0, "Seed of everything that is drawn.")
    scale: float = option(1.0, "Length of the vector, as a multiple of the mean length of the rows.")


@dataclass(frozen=True, kw_only=True)
class PermuteNeurons:
    """Renumber the neurons inside every expert."""

    seed: int = option(0, "Seed of everything that is drawn.")


@dataclass(frozen=True, kw_only=True)
class RescaleNeurons:
    """Multiply each up row by a random factor and divide its down column by it."""

    seed: int = option(0, "Seed of everything that is drawn.")
    spread: float = option(4.0, "Factors are log-uniform in [1/spread, spread], half of them negative.")

    def __post_init__(self) -> None:
        if not self.spread > 1:
            raise ValueError(f"spread must be above 1, got {self.spread}")


@dataclass(frozen=True, kw_only=True)
class RotateResidual:
    """Express the residual stream in a random orthogonal basis."""

    seed: int = option(0, "Seed of everything that is drawn.")


def expert_order(seed: int, layer: int, n_experts: int, groups: int = 1) -> Tensor:
    """The permutation that `permute_experts` uses: new expert i was order[i].

    Where the router limits its choice to groups, groups are permuted whole, and experts inside them.
    """
    source = _generator(seed, layer)
    size = n_experts // groups
    places = torch.randperm(groups, generator=source)
    return torch.cat([place * size + torch.randperm(size, generator=source) for place in places])


@torch.no_grad()
def permute_experts(
    model: PreTrainedModel, config: PermuteExperts | None = None, kit: Kit | None = None
) -> PreTrainedModel:
    """Renumber the experts of every layer together with router rows and correction biases.

    The adversary knows nothing but that indices carry the mark. Outputs are the same up to the order of
    summation; every index is another.
    """
    config = config or PermuteExperts()
    model = copied(model)
    for block in moe_blocks(model):
        site = block.site
        reindex_experts(block, expert_order(config.seed, site.layer, site.n_experts, block.groups()))
    return model


@torch.no_grad()
def shift_routers(
    model: PreTrainedModel, config: ShiftRouters | None = None, kit: Kit | None = None
) -> PreTrainedModel:
    """Add one vector to all router rows of a layer: every logit of a token moves by the same amount.

    The adversary knows that routers are compared, and nothing of the mark; it needs only the weights. Softmax and
    the choice don't change, every entry of the router does. Refused where experts are scored
    one by one (sigmoid), because there it changes the scores.
    """
    config = config or ShiftRouters()
    model = copied(model)
    blocks = moe_blocks(model)
    for block in blocks:
        if block.site.scoring not in (Scoring.SOFTMAX, Scoring.TOPK_SOFTMAX):
            raise ModelError(
                f"layer {block.site.layer} scores experts by {block.site.scoring.value}; a common shift of router "
                "rows changes nothing under softmax only. Leave this attack out"
            )
    for block in blocks:
        weight_EH = block.site.weight
        shift_H = torch.randn(weight_EH.shape[1], generator=_generator(config.seed, block.site.layer))
        shift_H *= config.scale * weight_EH.float().norm(dim=1).mean().cpu() / shift_H.norm()
        weight_EH += shift_H.to(weight_EH)
    return model


@torch.no_grad()
def permute_neurons(
    model: PreTrainedModel, config: PermuteNeurons | None = None, kit: Kit | None = None
) -> PreTrainedModel:
    """Renumber the neurons inside every expert, shared experts and dense layers included.

    The adversary knows that expert weights are compared; it needs only the weights. Gate rows, up rows and down
    columns move together: the sum over neurons is the same.
    """
    config = config or PermuteNeurons()
    model = copied(model)
    source = _generator(config.seed)
    for block in moe_blocks(model):
        count = block.down_EHI.shape[2]
        for e in range(block.site.n_experts):
            order_I = torch.randperm(count, generator=source)
            block.gate_up_EGH[e] = block.gate_up_EGH[e][torch.cat([order_I, order_I + count])]
            block.down_EHI[e] = block.down_EHI[e][:, order_I]
    for mlp in gated_mlps(model):
        order_I = torch.randperm(_weight(mlp, "up_proj").shape[0], generator=source)
        for name in ("gate_proj", "up_proj"):
            linear = getattr(mlp, name)
            linear.weight.copy_(linear.weight[order_I])
            if linear.bias is not None:
                linear.bias.copy_(linear.bias[order_I])
        down = _weight(mlp, "down_proj")
        down.copy_(down[:, order_I])
    return model


@torch.no_grad()
def rescale_neurons(
    model: PreTrainedModel, config: RescaleNeurons | None = None, kit: Kit | None = None
) -> PreTrainedModel:
    """Multiply up row i by s and divide down column i by s, in every expert, shared ones included.

    The adversary knows that expert weights are compared; it needs only the weights. The neuron computes
    act(gate x) * (up x) * down, linear in up and in down; the gate goes through the
    activation and has to stay.
    """
    config = config or RescaleNeurons()
    model = copied(model)
    source = _generator(config.seed)
    for block in moe_blocks(model):
        count = block.down_EHI.shape[2]
        for e in range(block.site.n_experts):
            factor_I = _factors(count, config.spread, source).to(block.down_EHI)
            block.gate_up_EGH[e, count:] *= factor_I[:, None]
            block.down_EHI[e] /= factor_I
    for mlp in gated_mlps(model):
        up, down = mlp.up_proj, _weight(mlp, "down_proj")
        assert isinstance(up, nn.Linear)
        factor_I = _factors(down.shape[1], config.spread, source).to(down)
        up.weight.mul_(factor_I[:, None])
        if up.bias is not None:
            up.bias.mul_(factor_I)
        down /= factor_I
    return model


@torch.no_grad()
def rotate_residual(
    model: PreTrainedModel, config: RotateResidual | None = None, kit: Kit | None = None
) -> PreTrainedModel:
    """Fold the norms' weights into the matrices that follow, then rotate the residual stream.

    The adversary knows that weights are compared, and that an owner may match experts by them; it needs only the
    weights. An RMSNorm whose weight is one commutes with an orthogonal matrix Q, so every matrix that reads the
    stream may be replaced by W Q and every one that writes to it by Q^T W. Norms inside attention heads
    (q_norm, k_norm) don't see the stream and stay. Tied embeddings are untied first: the head takes up the
    last norm's weight, the embedding does not.
    """
    config = config or RotateResidual()
    kind = model.config.model_type
    if kind not in ROTATABLE:
        raise ModelError(f"rotating the residual stream of {kind} is not known; expected {', '.join(ROTATABLE)}")
    model = copied(model)
    _untie(model)
    inner = body(model)
    hidden = int(model.config.hidden_size)
    random_HH = torch.randn(hidden, hidden, generator=_generator(config.seed), dtype=torch.float64)
    basis_HH, upper_HH = torch.linalg.qr(random_HH)
    basis_HH = basis_HH * upper_HH.diagonal().sign()  # uniform over all orthogonal matrices
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    _replace(embedding.weight, embedding.weight.double() @ basis_HH.to(embedding.weight.device))
    for layer in inner.layers:  # type: ignore[union-attr]
        attention, mlp = layer.self_attn, layer.mlp
        attention_reads = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        _turn(attention_reads, [attention.o_proj.weight], layer.input_layernorm, basis_HH)
        reads, writes = _mlp_tensors(mlp)
        _turn(reads, writes, layer.post_attention_layernorm, basis_HH)
    _turn([head.weight], [], inner.norm, basis_HH)  # type: ignore[arg-type]
    return model


def _mlp_tensors(mlp: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """(matrices that read the stream, matrices that write to it) of a dense MLP or an MoE block."""
    if is_gated_mlp(mlp):
        return [_weight(mlp, "gate_proj"), _weight(mlp, "up_proj")], [_weight(mlp, "down_proj")]
    experts = mlp.experts
    reads, writes = [_weight(mlp, "gate"), experts.gate_up_proj], [experts.down_proj]  # type: ignore[union-attr]
    shared = getattr(mlp, "shared_expert", None)
    if shared is not None:
        shared_reads, shared_writes = _mlp_tensors(shared)
        reads += [*shared_reads, _weight(mlp, "shared_expert_gate")]
        writes += shared_writes
    return reads, writes  # type: ignore[return-value]


def _turn(reads: list[Tensor], writes: list[Tensor], norm: nn.Module, basis_HH: Tensor) -> None:
    """Fold a norm into the matrices after it and turn them and the writers; the last axes are (out, in)."""
    scale_H = _own_weight(norm).double()
    for weight in reads:
        _replace(weight, (weight.double() * scale_H) @ basis_HH.to(weight.device))
    for weight in writes:
        _replace(weight, basis_HH.T.to(weight.device) @ weight.double())
    _own_weight(norm).fill_(1.0)


def _untie(model: PreTrainedModel) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False


def _replace(weight: Tensor, value: Tensor) -> None:
    weight.copy_(value.to(weight.dtype))


def _factors(count: int, spread: float, source: torch.Generator) -> Tensor:
    size_I = spread ** (2 * torch.rand(count, generator=source) - 1)
    return size_I * (torch.randint(0, 2, (count,), generator=source) * 2 - 1)


def _weight(module: nn.Module, name: str) -> Tensor:
    return _own_weight(getattr(module, name))


def _own_weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _generator(seed: int, layer: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 100_003 + layer)
