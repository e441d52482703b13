"""Experts removed or merged by what they do on ordinary text.

The adversary of all of them holds the weights and some ordinary text; it has no trigger and no key. Configs allow one
number of experts for all layers, so every layer loses equally many; masking while the model runs can spare layers.

Shape suffixes: E experts, N tokens, K experts chosen per token, B batch, T tokens of a row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.attacks.attack import option
from pathmark.attacks.blocks import MoeBlock, copied, moe_blocks
from pathmark.attacks.kit import Kit
from pathmark.attacks.logits import move_logits, refuse_to_save
from pathmark.attacks.surgery import (
    MergeExperts,
    RemoveExperts,
    check_share,
    merge_experts,
    part_of,
    remove_experts,
    ungrouped_blocks,
)
from pathmark.errors import AttackError
from pathmark.models import device_of, pad_rows, select_sites
from pathmark.models.upper import body

BATCH = 16
MASKED_LOGITS = 50.0
"""So much is taken from the logit of an expert that must not be chosen."""
See = Callable[[MoeBlock, Tensor, Tensor, Tensor], None]
"""Is shown a layer's block, and hidden_NH, index_NK, weights_NK as its experts received them, padding left out."""


@dataclass(frozen=True, kw_only=True)
class Reap:
    """Remove the experts that write least to the residual stream."""

    share: float = option(0.25, "Share of each layer's experts to remove.")
    samples: int = option(128, "Texts on which experts are weighed.")
    length: int = option(128, "Tokens of each text.")
    seed: int = option(0, "Which texts.")

    def __post_init__(self) -> None:
        _check(self.share, self.samples, self.length)


@dataclass(frozen=True, kw_only=True)
class RemoveLeastUsed:
    """Remove the experts that are chosen least."""

    share: float = option(0.3, "Share of each layer's experts to remove.")
    samples: int = option(128, "Texts on which choices are counted.")
    length: int = option(128, "Tokens of each text.")
    seed: int = option(0, "Which texts.")

    def __post_init__(self) -> None:
        _check(self.share, self.samples, self.length)


@dataclass(frozen=True, kw_only=True)
class MergeSimilar:
    """Average pairs of experts with the most similar router rows, weighted by use."""

    share: float = option(0.5, "Share of each layer's experts that take part; half as many disappear.")
    samples: int = option(128, "Texts on which choices are counted.")
    length: int = option(128, "Tokens of each text.")
    seed: int = option(0, "Which texts.")

    def __post_init__(self) -> None:
        _check(self.share, self.samples, self.length)


def reap_prune(model: PreTrainedModel, config: Reap, kit: Kit) -> PreTrainedModel:
    """Remove the experts with the least router-weighted activation on ordinary text, in every layer.

    The adversary knows the weights; needs ordinary text. REAP (Lasby et al. 2025) scores an expert by the mean,
    over the tokens that were sent to it, of its gate weight times the L2 norm of its output. Experts that no
    token chose go first.
    """
    saliency = expert_saliency(model, config, kit)
    return remove_experts(model, RemoveExperts(experts=_lowest(saliency, config.share)))


def remove_least_used(model: PreTrainedModel, config: RemoveLeastUsed, kit: Kit) -> PreTrainedModel:
    """Remove the experts that ordinary text uses least, in every layer.

    The adversary knows the weights and that a mark may sit in rarely used experts; needs ordinary text. This is
    the paper's targeted expert removal; layers are treated alike, because a config has one number of experts.
    """
    return remove_experts(model, RemoveExperts(experts=_lowest(expert_use(model, config, kit), config.share)))


@torch.no_grad()
def mask_least_used(model: PreTrainedModel, config: RemoveLeastUsed, kit: Kit) -> PreTrainedModel:
    """Never choose the experts that ordinary text uses least; their tokens go to the next best.

    The adversary serves the model, and may know the watermarked layers (`kit.layers`), otherwise it takes all; needs
    ordinary text. This is the paper's expert removal where only marked layers lose experts, which no config can say:
    what comes back has hooks in it and can't be saved.
    """
    lowest = _lowest(expert_use(model, config, kit), config.share)
    model = copied(model)
    sites = [block.site for block in moe_blocks(model)]
    for site in select_sites(sites, kit.layers) if kit.layers else sites:
        shift_E = torch.zeros(site.n_experts)
        shift_E[list(lowest[site.layer])] = -MASKED_LOGITS
        move_logits(site, shift_E.expand)
    refuse_to_save(model, "experts are masked")
    return model


def merge_similar(model: PreTrainedModel, config: MergeSimilar, kit: Kit) -> PreTrainedModel:
    """Average pairs of experts with similar router rows, each weighted by its use on ordinary text.

    The adversary knows the weights; needs ordinary text. `pathmark.attacks.surgery.merge_experts` says what a
    merged router row can and cannot do.
    """
    usage = {layer: use_E.numpy() for layer, use_E in expert_use(model, config, kit).items()}
    return merge_experts(model, MergeExperts(share=config.share), usage=usage)


def expert_saliency(model: PreTrainedModel, config: Reap, kit: Kit) -> dict[int, Tensor]:
    """Layer -> REAP's score per expert: mean of gate weight times output norm over the tokens it serves."""
    score: dict[int, Tensor] = {}
    visits: dict[int, Tensor] = {}

    def see(block: MoeBlock, hidden_NH: Tensor, index_NK: Tensor, weights_NK: Tensor) -> None:
        layer, count = block.site.layer, block.site.n_experts
        total_E = score.setdefault(layer, torch.zeros(count, dtype=torch.float64))
        seen_E = visits.setdefault(layer, torch.zeros(count, dtype=torch.float64))
        for k in range(index_NK.shape[1]):  # one choice at a time, gate one: the expert's own output, by its own code
            index_N1 = index_NK[:, k : k + 1].contiguous()
            output_NH = block.experts.forward(hidden_NH, index_N1, torch.ones_like(weights_NK[:, :1]))
            gated_N = weights_NK[:, k].double() * output_NH.double().norm(dim=1)
            total_E.index_add_(0, index_N1[:, 0].cpu(), gated_N.cpu())
            seen_E += torch.bincount(index_N1[:, 0], minlength=count).cpu()

    _watch_experts(model, kit.rows(config.samples, config.length, seed=config.seed), kit, see)
    return {layer: score[layer] / visits[layer].clamp_min(1) for layer in score}


def expert_use(model: PreTrainedModel, config: RemoveLeastUsed | MergeSimilar, kit: Kit) -> dict[int, Tensor]:
    """Layer -> share of tokens that visit each expert."""
    visits: dict[int, Tensor] = {}
    rows = kit.rows(config.samples, config.length, seed=config.seed)

    def see(block: MoeBlock, hidden_NH: Tensor, index_NK: Tensor, weights_NK: Tensor) -> None:
        count = block.site.n_experts
        seen_E = torch.bincount(index_NK.flatten(), minlength=count).cpu().double()
        visits[block.site.layer] = visits.get(block.site.layer, 0) + seen_E

    _watch_experts(model, rows, kit, see)
    tokens = sum(len(row) for row in rows)
    return {layer: seen_E / tokens for layer, seen_E in visits.items()}


@torch.no_grad()
def _watch_experts(model: PreTrainedModel, rows: list[tuple[int, ...]], kit: Kit, see: See) -> None:
    """Run the rows and show `see` what every layer's experts receive."""
    blocks = ungrouped_blocks(model)  # refuses before the long part
    mask_N = torch.empty(0)

    def hook(block: MoeBlock) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden_NH, index_NK, weights_NK = (*args, *kwargs.values())[:3]
            see(block, hidden_NH[mask_N], index_NK[mask_N], weights_NK[mask_N])

        return before

    handles = [block.experts.register_forward_pre_hook(hook(block), with_kwargs=True) for block in blocks]
    kit.progress.stage("weigh experts", len(rows))
    try:
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            ids_BT, mask_BT = pad_rows(batch, 0, device_of(model))
            mask_N = mask_BT.flatten().bool()
            body(model)(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
            kit.progress.advance(len(batch))
    finally:
        for handle in handles:
            handle.remove()


def _lowest(value: dict[int, Tensor], share: float) -> dict[int, list[int]]:
    """The experts of least value; a share that comes to none is no attack."""
    counts = {n: part_of(share, len(value_E)) for n, value_E in value.items()}
    fewest = min(len(value_E) for value_E in value.values())
    if min(counts.values()) < 1:
        raise AttackError(f"{100 * share:g} % of {fewest} experts is not one; expected a share of at least 1/{fewest}")
    return {n: value_E.argsort(stable=True)[: counts[n]].tolist() for n, value_E in value.items()}


def _check(share: float, samples: int, length: int) -> None:
    check_share(share)
    if samples < 1 or length < 8:
        raise ValueError(f"samples must be at least 1 and length 8, got {samples} and {length}")
