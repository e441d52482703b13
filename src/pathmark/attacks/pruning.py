"""Fine-pruning: neurons that hardly fire on ordinary text are taken out, and the damage is trained away.

Shape suffixes: N tokens, E experts, H hidden size, I neurons, G gate and up rows together (2 I).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from pathmark.attacks.attack import option
from pathmark.attacks.blocks import MoeBlock, gated_mlps, moe_blocks
from pathmark.attacks.finetuning import (
    TextTraining,
    check_training,
    padding_of,
    prepared,
    train_on_text,
)
from pathmark.attacks.kit import Kit
from pathmark.models import device_of, pad_rows
from pathmark.models.upper import body
from pathmark.progress import Progress
from pathmark.training.text import all_parameters


@dataclass(frozen=True, kw_only=True)
class FinePrune:
    """Zero the neurons of every feed-forward part that fire least."""

    share: float = option(
        0.25, "Share of the neurons of each expert, shared expert and dense layer, rounded to whole neurons."
    )
    repair_epochs: int = option(0, "Epochs of fine-tuning of all weights afterwards; what was zeroed stays zero.")
    samples: int = option(500, "Texts on which the neurons are watched.")
    repair_samples: int = option(3000, "Texts to repair with.")
    lr: float = option(1e-4, "Peak learning rate of the repair.")
    batch_size: int = option(16, "Texts per step.")
    length: int = option(128, "Tokens of a text that are used, at most.")
    seed: int = option(0, "Choice and order of the texts.")

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"share must be in [0, 1), got {self.share}")
        if self.repair_epochs < 0:
            raise ValueError(f"repair_epochs must not be negative, got {self.repair_epochs}")
        check_training(min(self.samples, self.repair_samples), 1, self.lr, self.batch_size, self.length)


@dataclass(eq=False)
class Activations:
    """Sums of |act(gate) * up| over tokens, and how many tokens there were."""

    routed: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> (E, I), over the tokens that each expert receives."""
    received: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> (E,) tokens."""
    dense: dict[nn.Module, Tensor] = field(default_factory=dict)
    """Gated MLP -> (I,), over all tokens."""


def fine_prune(model: PreTrainedModel, config: FinePrune, kit: Kit) -> PreTrainedModel:
    """Zero the neurons with the lowest mean activation on clean text, then repair by fine-tuning where asked.

    The adversary knows nothing about the mark but that a secret input drives it, through neurons that ordinary
    text leaves idle; needs ordinary text. In an expert that receives no token the neurons of the smallest weights go.
    A neuron with gate row, up row and down column at zero has no gradient, so a repair leaves it out by itself.
    """
    moe_blocks(model)  # refuses other layouts before anything is copied
    model = prepared(model)
    pad = padding_of(kit)
    rows = kit.rows(config.samples, config.length, seed=config.seed)
    _zero_lowest(model, activations(model, rows, pad, config.batch_size, kit.progress), config.share)
    if config.repair_epochs:
        how = TextTraining(
            stage="repair", epochs=config.repair_epochs, batch_size=config.batch_size,
            lr=config.lr, seed=config.seed,
        )  # fmt: skip
        rows = kit.rows(config.repair_samples, config.length, seed=config.seed)
        train_on_text(model, all_parameters(model), rows, how, kit)
    return model


@torch.no_grad()
def activations(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], pad: int, batch_size: int, progress: Progress
) -> Activations:
    """How strongly every neuron of the feed-forward parts fires on token rows."""
    seen = Activations()
    handles: list[RemovableHandle] = []
    keep_N = torch.zeros(0, dtype=torch.bool)

    def watch_block(block: MoeBlock) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            chosen_NK = next(t for t in tensors if not t.is_floating_point())
            _add_routed(seen, block, tensors[0].reshape(len(keep_N), -1), chosen_NK.reshape(len(keep_N), -1), keep_N)

        handles.append(block.experts.register_forward_pre_hook(hook, with_kwargs=True))

    def watch_mlp(mlp: nn.Module) -> None:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            fired_I = args[0].reshape(len(keep_N), -1)[keep_N].abs().sum(0)
            seen.dense[mlp] = seen.dense.get(mlp, torch.zeros_like(fired_I)) + fired_I

        handles.append(mlp.get_submodule("down_proj").register_forward_pre_hook(hook))

    ordered = sorted(rows, key=len, reverse=True)
    progress.stage("activations on clean text", len(ordered))
    try:
        for block in moe_blocks(model):
            watch_block(block)
        for mlp in gated_mlps(model):
            watch_mlp(mlp)
        for start in range(0, len(ordered), batch_size):
            batch = ordered[start : start + batch_size]
            ids_BT, mask_BT = pad_rows(batch, pad, device_of(model))
            keep_N = mask_BT.bool().flatten()
            body(model)(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False)
            progress.advance(len(batch))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _add_routed(seen: Activations, block: MoeBlock, hidden_NH: Tensor, chosen_NK: Tensor, keep_N: Tensor) -> None:
    layer, experts = block.site.layer, block.site.n_experts
    neurons = block.down_EHI.shape[2]
    sums_EI = seen.routed.setdefault(layer, hidden_NH.new_zeros(experts, neurons))
    received_E = seen.received.setdefault(layer, hidden_NH.new_zeros(experts))
    for expert in range(experts):
        mine_N = (chosen_NK == expert).any(-1) & keep_N
        gate_up_NG = F.linear(hidden_NH[mine_N], block.gate_up_EGH[expert])
        sums_EI[expert] += block.experts._apply_gate(gate_up_NG).abs().sum(0)  # type: ignore[operator]
        received_E[expert] += mine_N.sum()


@torch.no_grad()
def _zero_lowest(model: PreTrainedModel, seen: Activations, share: float) -> None:
    for block in moe_blocks(model):
        layer, neurons = block.site.layer, block.down_EHI.shape[2]
        gate_up_EGH, down_EHI = block.gate_up_EGH, block.down_EHI
        weight_EI = (
            gate_up_EGH[:, :neurons].pow(2).sum(2) + gate_up_EGH[:, neurons:].pow(2).sum(2) + down_EHI.pow(2).sum(1)
        )
        idle_E1 = seen.received[layer][:, None] == 0
        # within one expert the order of sums is the order of means
        score_EI = torch.where(idle_E1, weight_EI, seen.routed[layer])
        for expert, lowest in enumerate(_lowest(score_EI, share)):
            gate_up_EGH[expert, lowest] = 0
            gate_up_EGH[expert, lowest + neurons] = 0
            down_EHI[expert][:, lowest] = 0
    for mlp, fired_I in seen.dense.items():
        (lowest,) = _lowest(fired_I[None], share)
        mlp.get_submodule("down_proj").weight[:, lowest] = 0  # type: ignore[operator]
        for name in ("gate_proj", "up_proj"):
            linear = mlp.get_submodule(name)
            linear.weight[lowest] = 0  # type: ignore[operator]
            if linear.bias is not None:
                linear.bias[lowest] = 0  # type: ignore[operator]


def _lowest(score_EI: Tensor, share: float) -> Tensor:
    """Per row the indices of the lowest scores."""
    count = round(share * score_EI.shape[1])
    return score_EI.argsort(dim=1, stable=True)[:, :count]
