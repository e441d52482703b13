"""Experts that stay on disk: each is read when a token visits it, and read again for the gradient.

Nine tenths of an MoE are experts, and an embedding changes few of them. Those few are ordinary parameters in 32 bits;
all others are never in memory, one at a time excepted, and keep the type and the place that they have on disk.

Shape suffixes: N tokens, H hidden size, K experts chosen per token; T trained experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pathmark.errors import ModelError
from pathmark.models.conversion import Piece, Recipe, expert_pieces, fill_expert, has_single_experts
from pathmark.models.weights import is_finite

TRAINED = "trained_"
"""Before the name of a fused tensor: the part of it that is in memory and may change."""


class DiskExperts:
    """Stands before an experts module whose fused tensors are on disk; experts that are trained are in memory."""

    def __init__(self, module: nn.Module, recipes: Mapping[str, Recipe], trained: Sequence[int]) -> None:
        """`recipes` by the name of the fused tensor inside the module, such as `down_proj`."""
        inside: Any = module
        self.module, count = inside, int(inside.num_experts)
        self.pieces = {leaf: [expert_pieces(recipe, e) for e in range(count)] for leaf, recipe in recipes.items()}
        self.shapes = {leaf: module.get_parameter(leaf).shape[1:] for leaf in recipes}
        self.trained = {expert: place for place, expert in enumerate(sorted(trained))}
        for leaf in recipes:
            del module._parameters[leaf]
            if trained:
                parts_T = torch.stack([self._read(leaf, expert) for expert in self.trained])
                module.register_parameter(TRAINED + leaf, nn.Parameter(parts_T))
        module.forward = self.forward

    def matrix(self, leaf: str, expert: int) -> Tensor:
        """One expert's part of a fused tensor, as it is now, in 32 bits."""
        if expert in self.trained:
            found: Tensor = getattr(self.module, TRAINED + leaf)[self.trained[expert]]
            return found
        return self._read(leaf, expert)

    def forward(self, hidden_NH: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """As the family's own experts, one after the other."""
        out_NH = torch.zeros_like(hidden_NH)
        for expert in sorted(set(chosen_NK.flatten().tolist())):
            if expert >= len(next(iter(self.pieces.values()))):  # what transformers gives to nobody
                continue
            n, k = (chosen_NK == expert).nonzero(as_tuple=True)
            visitors = hidden_NH[n]
            if visitors.requires_grad and expert not in self.trained:  # read again in the backward pass, not kept
                made = checkpoint(self._run, visitors, expert, use_reentrant=False, preserve_rng_state=False)
            else:
                made = self._run(visitors, expert)
            out_NH = out_NH.index_add_(0, n, (made * weights_NK[n, k, None]).to(out_NH.dtype))
        return out_NH

    def _run(self, hidden_NH: Tensor, expert: int) -> Tensor:
        module = self.module
        first = "gate_up_proj" if module.has_gate else "up_proj"
        made = self._linear(hidden_NH, first, expert)
        made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
        made = self._linear(made, "down_proj", expert)
        return module.post_expert_norm(made) if module.has_post_expert_norm else made

    def _linear(self, values: Tensor, leaf: str, expert: int) -> Tensor:
        weight = self.matrix(leaf, expert).to(values.dtype)
        bias = getattr(self.module, f"{leaf}_bias")[expert] if self.module.has_bias else None
        return F.linear(values, weight.T if self.module.is_transposed else weight, bias)

    def _read(self, leaf: str, expert: int) -> Tensor:
        matrix = torch.empty(self.shapes[leaf])
        fill_expert(matrix, self.pieces[leaf][expert])
        if not is_finite(matrix):
            raise ModelError(f"expert {expert} holds NaN or inf; expected finite weights. No verdict on such a model")
        return matrix

    def changed(self) -> list[tuple[Piece, Tensor]]:
        """Of every trained expert: stored matrices and their new values, in 32 bits."""
        return [
            (piece, matrix.detach().narrow(piece.axis, piece.start, piece.size))
            for leaf in self.pieces
            for expert in self.trained
            for matrix in [self.matrix(leaf, expert)]
            for piece in self.pieces[leaf][expert]
        ]


def disk_experts(module: nn.Module | None) -> DiskExperts | None:
    """What stands before an experts module, if its experts are on disk."""
    owner = getattr(vars(module).get("forward"), "__self__", None) if module is not None else None
    return owner if isinstance(owner, DiskExperts) else None


def fused_leaves(name: str, module: nn.Module | None, recipes: Sequence[Recipe]) -> dict[str, Recipe]:
    """The recipes of an experts module's fused tensors by their names inside it; empty if they must be read whole."""
    if module is None or not hasattr(module, "has_gate") or not hasattr(module, "num_experts"):
        return {}
    wanted = {"gate_up_proj" if module.has_gate else "up_proj", "down_proj"}
    found = {r.first.removeprefix(f"{name}."): r for r in recipes if r.first.startswith(f"{name}.")}
    chosen = {leaf: recipe for leaf, recipe in found.items() if leaf in wanted and has_single_experts(recipe)}
    return chosen if chosen.keys() == wanted else {}
