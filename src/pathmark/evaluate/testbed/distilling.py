"""The carved model taught to do what the dense one did: first layer by layer, then as a whole.

Nothing below the first MoE layer changes, so what comes out there is computed once, and what the dense model makes of
it.

Shape suffixes: R rows, T tokens of a row, N tokens, H hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pathmark.evaluate.testbed.carving import Shape, moe_parameters
from pathmark.models.upper import body, output_head, without_layers_below
from pathmark.progress import Progress
from pathmark.training import LoopConfig, linear_distillation, only_trainable, run_loop

BALANCE = 0.02
"""Weight of an even use of the experts; without it the router comes to prefer a few."""


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """How long to teach."""

    rows: int = 1500
    """Texts, of `length` tokens each."""
    length: int = 128
    layer_steps: int = 150
    """Of every layer by itself, with `layer_tokens` tokens each."""
    layer_tokens: int = 1024
    layer_lr: float = 5e-4
    steps: int = 400
    """Of the whole, with `batch` texts each."""
    batch: int = 8
    lr: float = 3e-4
    scored: int = 384
    """Tokens per step whose next-token distributions are compared: the vocabulary is the dearest part of a step."""
    seed: int = 0


@dataclass(frozen=True)
class Taught:
    """What the dense model does with the rows."""

    entering_RTH: Tensor
    """Hidden states that enter the first MoE layer."""
    final_RTH: Tensor
    """Its last hidden states."""
    before: Mapping[int, Tensor]
    """Layer -> what enters its feed-forward part, (N, H), of the first rows."""


@torch.no_grad()
def listen(dense: PreTrainedModel, rows: Sequence[Sequence[int]], shape: Shape, progress: Progress) -> Taught:
    """Run the rows through the dense model once; the first fifth of them is kept in front of every layer to carve."""
    stack: Any = body(dense).layers
    first = len(stack) - shape.moe_layers
    kept: dict[int, list[Tensor]] = {layer: [] for layer in range(first, len(stack))}
    entering, final = [], []
    few = max(1, len(rows) // 5)
    progress.stage("the dense model, on its rows", len(rows))
    for number, row in enumerate(rows):
        handles = [stack[first].register_forward_pre_hook(
            lambda m, args, kwargs: entering.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )]  # fmt: skip
        if number < few:
            handles += [
                stack[layer].mlp.register_forward_pre_hook(lambda m, args, layer=layer: kept[layer].append(args[0][0]))
                for layer in kept
            ]
        try:
            final.append(body(dense)(input_ids=torch.tensor([list(row)]), use_cache=False).last_hidden_state)
        finally:
            for handle in handles:
                handle.remove()
        progress.advance(1)
    return Taught(torch.cat(entering), torch.cat(final), {layer: torch.cat(found) for layer, found in kept.items()})


def fit_layer(mlp: Any, block: Any, hidden_NH: Tensor, config: Distillation, report: Callable[..., None]) -> float:
    """Teach one MoE block what the dense layer made of the same tokens; the relative error that is left."""
    with torch.no_grad():
        wanted_NH = mlp(hidden_NH)
    size_N = wanted_NH.square().sum(1)
    size_N = size_N + 0.1 * size_N.median()  # hardly anything may come out for a token

    def step_loss(step: int, generator: torch.Generator) -> dict[str, Tensor]:
        chosen = torch.randint(len(hidden_NH), (config.layer_tokens,), generator=generator)
        error = _error(block, hidden_NH[chosen], wanted_NH[chosen], size_N[chosen])
        return {"loss": error + BALANCE * _imbalance(block, hidden_NH[chosen]), "error": error}

    parameters = dict(block.named_parameters())
    run_loop(parameters, step_loss, LoopConfig(steps=config.layer_steps, lr=config.layer_lr), progress=report)
    with torch.no_grad():
        return float(_error(block, hidden_NH[:4096], wanted_NH[:4096], size_N[:4096]))


def distil(
    model: PreTrainedModel, taught: Taught, shape: Shape, config: Distillation, checkpoint: Path, progress: Progress
) -> None:
    """Teach the whole: the dense model's next-token distribution, from the cached states on."""
    stack: Any = body(model).layers
    first = len(stack) - shape.moe_layers
    head_VH, scale = output_head(model)
    parameters = moe_parameters(model, shape)
    rows, length = taught.entering_RTH.shape[:2]
    progress.stage("distillation of the whole", config.steps)
    taken = 0

    def step_loss(step: int, generator: torch.Generator) -> dict[str, Tensor]:
        chosen = torch.randint(rows, (config.batch,), generator=generator)
        with without_layers_below(stack, first):
            mine_BTH = body(model)(inputs_embeds=taught.entering_RTH[chosen], use_cache=False).last_hidden_state
        scored = torch.randperm(config.batch * length, generator=generator)[: config.scored]
        mine_NH, theirs_NH = (states.flatten(0, 1)[scored] for states in (mine_BTH, taught.final_RTH[chosen]))
        return {"loss": linear_distillation(mine_NH, theirs_NH, head_VH, scale=scale)}

    def report(step: int, losses: Mapping[str, float]) -> None:
        nonlocal taken
        progress.advance(step - taken, f"KL {losses['loss']:.3f}")
        taken = step

    loop = LoopConfig(steps=config.steps, lr=config.lr, seed=config.seed)
    with only_trainable(model, parameters):
        run_loop(
            parameters, step_loss, loop, checkpoint=checkpoint, resume=True, progress=report, fingerprint=repr(config)
        )


def _error(block: Any, hidden_NH: Tensor, wanted_NH: Tensor, size_N: Tensor) -> Tensor:
    found = block(hidden_NH[None])
    found_NH = (found[0] if isinstance(found, tuple) else found).reshape_as(wanted_NH)
    error: Tensor = ((found_NH - wanted_NH).square().sum(1) / size_N).mean()
    return error


def _imbalance(block: Any, hidden_NH: Tensor) -> Tensor:
    """1 where all experts are used alike, as in the Switch Transformer."""
    probs_NE = torch.softmax(hidden_NH @ block.gate.weight.T, dim=-1)
    experts = probs_NE.shape[1]
    chosen_NK = probs_NE.topk(block.gate.top_k, dim=-1).indices
    share_E = torch.bincount(chosen_NK.flatten(), minlength=experts) / chosen_NK.numel()
    return experts * (share_E * probs_NE.mean(0)).sum()
