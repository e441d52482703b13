"""Experts and layers taken away, merged or doubled, and more or fewer chosen: structural changes that cost quality.

Each is model in, model out; the model that goes in is not touched. The adversary holds the weights; to
choose experts by use it also needs ordinary text (`pathmark.models.expert_usage`; `pathmark.attacks.saliency` has
the attacks that do so). It has no trigger and no key. Configs allow one number of experts for all layers, so every
layer loses or gains equally many.

Shape suffixes: E experts, H hidden size, B batch, T tokens, N real tokens, L layers, P pairs of experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.attacks.attack import option
from pathmark.attacks.blocks import MoeBlock, copied, moe_blocks, reindex_experts, set_expert_count
from pathmark.attacks.kit import Kit
from pathmark.errors import AttackError, ModelError
from pathmark.models import Scoring, device_of, pad_rows
from pathmark.models.upper import body, layer_stack

BATCH = 16
Usage = Mapping[int, NDArray[np.float64]]
"""Layer -> share of tokens that visit each expert, as `expert_usage` gives it."""


@dataclass(frozen=True, kw_only=True)
class RemoveExperts:
    """Take experts away: the ones named, or the least used."""

    share: float = 0.0
    """Share of each layer's experts to remove, least used first."""
    experts: Mapping[int, Sequence[int]] | None = None
    """Layer -> experts to remove instead, equally many in every layer."""

    def __post_init__(self) -> None:
        check_share(self.share)


@dataclass(frozen=True, kw_only=True)
class MergeExperts:
    """Average pairs of experts with the most similar router rows."""

    share: float = 0.5
    """Share of each layer's experts that take part; half as many disappear."""

    def __post_init__(self) -> None:
        check_share(self.share)


@dataclass(frozen=True, kw_only=True)
class DuplicateExperts:
    """Add copies of experts."""

    count: int = option(1, "How many of each layer's experts are doubled, drawn at random.")
    seed: int = option(0, "Seed of everything that is drawn.")


@dataclass(frozen=True, kw_only=True)
class ChangeTopK:
    """Send each token to another number of experts."""

    top_k: int = option(2, "Experts per token, in every layer.")

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")


@dataclass(frozen=True, kw_only=True)
class DropLayers:
    """Take whole decoder layers away."""

    count: int = option(1, "How many layers go.")
    where: Literal["similar", "late"] = option(
        "similar", "similar: those that turn the hidden state least; late: the ones before the last layer, which stays."
    )
    samples: int = option(64, "Texts on which the turn is measured.")
    length: int = option(128, "Tokens of each text.")
    seed: int = option(0, "Which texts.")

    def __post_init__(self) -> None:
        if self.where not in ("similar", "late"):
            raise ValueError(f"where must be similar or late, got {self.where}")
        if min(self.count, self.samples) < 1 or self.length < 8:
            raise ValueError(
                f"count and samples must be at least 1 and length 8, got {self.count}, {self.samples}, {self.length}"
            )


@torch.no_grad()
def remove_experts(
    model: PreTrainedModel, config: RemoveExperts | None = None, *, usage: Usage | None = None
) -> PreTrainedModel:
    """Remove experts with their router rows. The rest keeps its order; the router shares out what they had.

    The adversary prunes for size, or in the hope that rarely used experts carry the mark.
    """
    config = config or RemoveExperts(share=0.25)
    model = copied(model)
    blocks = ungrouped_blocks(model)
    for block in blocks:
        gone = _chosen(block, config, usage)
        keep = [e for e in range(block.site.n_experts) if e not in gone]
        if len(keep) < block.site.top_k:
            raise ModelError(
                f"layer {block.site.layer}: {len(keep)} experts would be left, its router chooses {block.site.top_k}; "
                "remove fewer"
            )
        reindex_experts(block, torch.tensor(keep))
    return _recount(model)


@torch.no_grad()
def merge_experts(
    model: PreTrainedModel, config: MergeExperts | None = None, *, usage: Usage | None = None
) -> PreTrainedModel:
    """Average pairs of experts, most similar router rows first; weighted by use where that is known.

    The merged router row is the weighted mean of the two. To receive what both received its logit would have
    to be log(exp z1 + exp z2), which no linear row gives; the mean gives their geometric mean, so a merged
    expert is chosen somewhat less than the two were. The pair's place is that of its first expert.
    """
    config = config or MergeExperts()
    model = copied(model)
    for block in ungrouped_blocks(model):
        count = block.site.n_experts
        pairs = similar_pairs(block.site.weight, part_of(config.share, count) // 2)
        for first, second in pairs:
            weight = 0.5
            if usage is not None:
                used = usage[block.site.layer]
                weight = float(used[first] + 1e-6) / float(used[first] + used[second] + 2e-6)
            for owner, name in block.per_expert():
                tensor = getattr(owner, name)
                tensor[first] = weight * tensor[first] + (1 - weight) * tensor[second]
        gone = {second for _, second in pairs}
        reindex_experts(block, torch.tensor([e for e in range(count) if e not in gone]))
    return _recount(model)


def similar_pairs(rows_EH: Tensor, n_pairs: int) -> list[tuple[int, int]]:
    """Disjoint pairs of experts, greedily by the cosine of their router rows centred over experts."""
    centred_EH = rows_EH.detach().float() - rows_EH.detach().float().mean(0)
    unit_EH = torch.nn.functional.normalize(centred_EH, dim=1)
    cosine_EE = (unit_EH @ unit_EH.T).cpu()
    first_P, second_P = torch.triu_indices(len(rows_EH), len(rows_EH), offset=1)
    taken: set[int] = set()
    pairs: list[tuple[int, int]] = []
    for i in torch.argsort(cosine_EE[first_P, second_P], descending=True).tolist():
        pair = int(first_P[i]), int(second_P[i])
        if len(pairs) < n_pairs and not taken.intersection(pair):
            pairs.append(pair)
            taken.update(pair)
    return pairs


@torch.no_grad()
def duplicate_experts(
    model: PreTrainedModel, config: DuplicateExperts | None = None, kit: Kit | None = None
) -> PreTrainedModel:
    """Add a second copy of some experts, at the end of each layer, and halve what both copies write.

    The adversary knows that experts are counted and matched; it needs only the weights. The copies have equal
    router rows, hence equal logits: a token that chooses one chooses both, and they contribute together what the one
    did. They take two of the k places, so the k-th choice falls out, and the softmax is shared by more experts:
    outputs change a little.
    """
    config = config or DuplicateExperts()
    model = copied(model)
    for block in ungrouped_blocks(model):
        count = block.site.n_experts
        source = torch.Generator().manual_seed(config.seed * 100_003 + block.site.layer)
        doubled = torch.randperm(count, generator=source)[: config.count].sort().values
        block.down_EHI[doubled] /= 2
        reindex_experts(block, torch.cat([torch.arange(count), doubled]))
    return _recount(model)


@torch.no_grad()
def drop_layers(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """Remove whole decoder layers; the rest moves down and the config follows.

    The adversary prunes in depth: neighbouring layers of deep models do similar work.
    """
    model = copied(model)
    blocks = moe_blocks(model)
    routed = {block.site.layer for block in blocks}
    stack, config = layer_stack(model, blocks[0].site), model.config
    count = len(stack)
    gone = set(layers)
    if not gone < set(range(count)):
        raise ModelError(f"expected some but not all of layers 0 to {count - 1}, got {sorted(gone)}")
    keep = [n for n in range(count) if n not in gone]
    kept = [stack[n] for n in keep]
    while len(stack):
        del stack[0]
    for place, layer in enumerate(kept):
        stack.append(layer)
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = place  # type: ignore[assignment]
    config.num_hidden_layers = len(keep)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and len(kinds) == count:
            setattr(config, name, [kinds[n] for n in keep])
    dense = [place for place, n in enumerate(keep) if n not in routed]
    if hasattr(config, "mlp_only_layers"):  # qwen: which layers are dense, by list and by stride
        config.mlp_only_layers, config.decoder_sparse_step = dense, 1
    elif hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = len(dense)
    return model


@torch.no_grad()
def drop_chosen_layers(model: PreTrainedModel, config: DropLayers, kit: Kit) -> PreTrainedModel:
    """Remove the layers that change the hidden state least on ordinary text, or the late ones.

    The adversary knows the weights; needs ordinary text to find similar layers, nothing for late ones. A layer's
    work is the mean angle between what enters and what leaves it. `late` keeps the last layer, as pruning in
    depth does, because no other writes for the output head.
    """
    stack = layer_stack(model, moe_blocks(model)[0].site)
    if config.count >= len(stack):
        raise AttackError(f"expected fewer than the model's {len(stack)} layers to drop, got {config.count}")
    if config.where == "late":
        last = len(stack) - 1
        return drop_layers(model, range(last - config.count, last))
    angles_L = layer_angles(model, stack, kit.rows(config.samples, config.length, seed=config.seed), kit)
    return drop_layers(model, angles_L.argsort(stable=True)[: config.count].tolist())


@torch.no_grad()
def layer_angles(model: PreTrainedModel, stack: nn.ModuleList, rows: Sequence[Sequence[int]], kit: Kit) -> Tensor:
    """Mean angle, as a share of a half turn, between each layer's input and output over the tokens of the rows."""
    total_L = torch.zeros(len(stack), dtype=torch.float64)
    entered: dict[nn.Module, Tensor] = {}
    tokens, mask_BT = 0, torch.empty(0)

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered[layer] = args[0] if args else kwargs["hidden_states"]

    def leave(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        out_BTH = output[0] if isinstance(output, tuple) else output
        cosine_BT = torch.nn.functional.cosine_similarity(entered.pop(layer).double(), out_BTH.double(), dim=-1)
        total_L[places[layer]] += (cosine_BT[mask_BT.bool()].clamp(-1, 1).arccos() / torch.pi).sum().cpu()

    places = {layer: n for n, layer in enumerate(stack)}
    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in stack]
    handles += [layer.register_forward_hook(leave) for layer in stack]
    kit.progress.stage("compare layers", len(rows))
    try:
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            ids_BT, mask_BT = pad_rows(batch, 0, device_of(model))
            body(model)(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
            tokens += int(mask_BT.sum())
            kit.progress.advance(len(batch))
    finally:
        for handle in handles:
            handle.remove()
    return total_L / tokens


def change_top_k(model: PreTrainedModel, config: ChangeTopK, kit: Kit) -> PreTrainedModel:
    """Let every router choose another number of experts per token.

    The adversary knows the weights; needs nothing. Weights stay as they are, only the config and the routers'
    numbers change. Where the router does not share its choice out to one (qwen2_moe, olmoe by default), fewer
    experts also write less.
    """
    model = copied(model)
    blocks = moe_blocks(model)
    text_config, names = model.config.get_text_config(), ("top_k", "num_experts_per_tok")
    if not isinstance(getattr(text_config, names[1], None), int):
        raise ModelError(f"{type(model).__name__}: expected num_experts_per_tok in its config; top-k can't be changed")
    for block in blocks:
        if block.site.scoring is Scoring.SPARSEMIXER:
            raise ModelError(
                f"layer {block.site.layer}: expected a router that reads top-k from the config, got sparsemixer, whose "
                "code always chooses two; leave this attack out"
            )
        if config.top_k > block.site.n_experts:
            raise AttackError(f"layer {block.site.layer} has {block.site.n_experts} experts, got top_k {config.top_k}")
        if config.top_k == block.site.top_k:
            raise AttackError(f"layer {block.site.layer} already chooses {config.top_k}; ask for another top_k")
    kit.progress.stage("top-k", len(blocks))
    for block in blocks:
        for module in (block.site.router, block.block, block.experts):
            for name in names:
                if isinstance(getattr(module, name, None), int):
                    setattr(module, name, config.top_k)
        kit.progress.advance(1)
    text_config.num_experts_per_tok = config.top_k
    assert all(block.site.top_k == config.top_k for block in moe_blocks(model))
    return model


def _chosen(block: MoeBlock, config: RemoveExperts, usage: Usage | None) -> set[int]:
    layer, count = block.site.layer, block.site.n_experts
    if config.experts is not None:
        gone = set(config.experts.get(layer, ()))
        if not gone <= set(range(count)):
            raise ModelError(f"layer {layer} has experts 0 to {count - 1}, got {sorted(gone)}")
        return gone
    if usage is None or layer not in usage:
        raise ModelError(f"removal by use needs the use of layer {layer}'s experts; pass usage=expert_usage(...)")
    return set(np.argsort(usage[layer], kind="stable")[: part_of(config.share, count)].tolist())


def ungrouped_blocks(model: PreTrainedModel) -> list[MoeBlock]:
    """Every MoE layer, or a refusal where the number of experts can't be changed."""
    blocks = moe_blocks(model)
    if grouped := [block.site.layer for block in blocks if block.groups() > 1]:
        raise ModelError(
            f"layer {grouped[0]} chooses within groups of experts, whose sizes are fixed; expected a router without "
            "group limit to change the number of experts"
        )
    return blocks


def _recount(model: PreTrainedModel) -> PreTrainedModel:
    counts = {block.site.layer: block.site.n_experts for block in moe_blocks(model)}
    if len(set(counts.values())) != 1:
        raise ModelError(f"a config has one number of experts for all layers, got {counts}; remove equally many")
    set_expert_count(model, next(iter(counts.values())))
    return model


def part_of(share: float, count: int) -> int:
    """A share of so many, rounded down; 1/49 of 49 is one, whatever floating-point numbers say."""
    return math.floor(share * count + 1e-9)


def check_share(share: float) -> None:
    """Refuse what is not a share of a layer's experts."""
    if not 0 <= share < 1:
        raise ValueError(f"share must be in [0, 1), got {share}")
