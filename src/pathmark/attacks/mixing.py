"""The stolen weights mixed with another model of the same shapes.

The adversary of all three holds the stolen weights and a second model: the public original, or a sibling that was
trained from it. It has no text and no key. Whoever has the very original needs no stolen copy; these matter where
the stolen model learned something worth having, and the thief hopes to thin out the rest.

Everything is computed in float32 (float64 for ranks) on parameters and correction biases, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.attacks.attack import option
from pathmark.attacks.blocks import copied, moe_blocks
from pathmark.attacks.kit import Kit
from pathmark.errors import AttackError


@dataclass(frozen=True, kw_only=True)
class Average:
    """The mean of the stolen model and another."""

    weight: float = option(0.5, "Weight of the stolen model; the other one has the rest.")

    def __post_init__(self) -> None:
        if not 0 < self.weight < 1:
            raise ValueError(f"weight must be between 0 and 1, got {self.weight}")


@dataclass(frozen=True, kw_only=True)
class DareTies:
    """A thinned-out copy of the change from the other model to the stolen one."""

    method: Literal["dare", "ties"] = option(
        "dare", "dare keeps entries at random and scales them up; ties keeps the largest as they are."
    )
    density: float = option(0.5, "Share of each tensor's entries that keep a change.")
    weight: float = option(1.0, "Factor on what is left of the change.")
    seed: int = option(0, "Of dare's draw.")

    def __post_init__(self) -> None:
        if self.method not in ("dare", "ties"):
            raise ValueError(f"method must be dare or ties, got {self.method}")
        if not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], got {self.density}")
        if not self.weight > 0:
            raise ValueError(f"weight must be above 0, got {self.weight}")


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """The change from the other model to the stolen one, cut to a low rank."""

    rank: int = option(4, "Singular directions of the change that each matrix keeps.")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")


@torch.no_grad()
def average(model: PreTrainedModel, config: Average, kit: Kit) -> PreTrainedModel:
    """Average every weight with the other model's: weight * stolen + (1 - weight) * other.

    The adversary knows a model of the same lineage; needs its weights, no text.
    """
    model = copied(model)
    for mine, other in _paired(model, kit):
        mine.copy_(torch.lerp(other.float(), mine.float(), config.weight))
    return model


@torch.no_grad()
def dare_ties(model: PreTrainedModel, config: DareTies, kit: Kit) -> PreTrainedModel:
    """Thin out the task vector d = stolen - other by DARE or TIES, and put it back: other + weight * d'.

    The adversary knows the model that the stolen one was trained from; needs its weights, no text. DARE (Yu et
    al. 2024) keeps each entry of d with probability `density` and divides it by that. TIES (Yadav et al. 2023)
    keeps the share `density` of each tensor's entries with the largest magnitude, elects a sign per entry and
    averages the vectors that agree with it; with one task vector, as here, the last two steps change nothing.
    """
    source = torch.Generator().manual_seed(config.seed)
    model = copied(model)
    for mine, other in _paired(model, kit):
        change = mine.float() - other.float()
        if config.method == "dare":
            kept = torch.rand(change.shape, generator=source).to(change.device) < config.density
            change = change * kept / config.density
        else:
            change = _largest(change, config.density)
        mine.copy_(other.float() + config.weight * change)
    return model


@torch.no_grad()
def low_rank(model: PreTrainedModel, config: LowRank, kit: Kit) -> PreTrainedModel:
    """Cut the change of every matrix to its `rank` largest singular directions: other + truncated(stolen - other).

    The adversary knows the model that the stolen one was trained from; needs its weights, no text. Each expert is
    a matrix of its own. Vectors (norms, biases) have rank one and keep their change, and so does a matrix whose
    smaller side is not above the rank.
    """
    model = copied(model)
    for mine, other in _paired(model, kit):
        if mine.ndim < 2 or min(mine.shape[-2:]) <= config.rank:
            continue
        change = mine.double() - other.double()
        if bool(change.any()):
            mine.copy_(other.double() + truncated(change, config.rank))
    return model


def truncated(matrix: Tensor, rank: int) -> Tensor:
    """The nearest matrix of that rank, over the last two axes.

    By projection on the leading eigenvectors of the smaller Gram matrix: in float64 as good as singular values
    here, and an embedding of 150,000 rows costs no more than its own columns.
    """
    if matrix.shape[-2] < matrix.shape[-1]:
        return truncated(matrix.mT, rank).mT
    leading: Tensor = torch.linalg.eigh(matrix.mT @ matrix).eigenvectors[..., -rank:]
    return matrix @ leading @ leading.mT


def matching(mine: nn.Module, other: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    """(name, mine, other's) of every parameter and saved floating-point buffer of two modules of the same shapes."""
    here, there = mine.state_dict(keep_vars=True), other.state_dict(keep_vars=True)  # tied tensors under all names
    for name in [*here, *there]:
        if name not in here or name not in there or here[name].shape != there[name].shape:
            got = " and ".join(str(tuple(side[name].shape)) if name in side else "nothing" for side in (here, there))
            raise AttackError(
                f"expected two models of the same shapes, got {got} for {name}; take the original of the stolen model "
                "or a sibling"
            )
    buffers = [(name, b) for name, b in mine.named_buffers() if name in here and b.is_floating_point()]
    return [(name, tensor, there[name].to(tensor.device)) for name, tensor in [*mine.named_parameters(), *buffers]]


def _paired(model: PreTrainedModel, kit: Kit) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors of both models side by side; everything is checked before the first one comes."""
    other = kit.second_model()
    moe_blocks(model)
    pairs = matching(model, other)
    kit.progress.stage("mix", len(pairs))
    for name, mine, theirs in pairs:
        yield mine, theirs
        kit.progress.advance(1, name)


def _largest(change: Tensor, density: float) -> Tensor:
    """Only the share of entries with the largest magnitude; ties at the threshold by position."""
    flat = change.flatten()
    kept = flat.abs().argsort(descending=True, stable=True)[: max(1, round(density * flat.numel()))]
    thinned = torch.zeros_like(flat)
    thinned[kept] = flat[kept]
    return thinned.reshape(change.shape)
