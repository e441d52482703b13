"""Fewer bits per weight: round-to-nearest, GPTQ and AutoRound, on experts and, where asked, on routers.

Each is model in, model out; what comes out is a float model whose weights lie on the integers' grid. Experts, shared
experts, dense layers and attention are quantized; embeddings, norms, biases, the head and one-row gates are not.
Libraries are known to leave fused experts alone without a word, so every tensor is checked after they are done.
The adversary wants a smaller copy; that the mark might suffer is a side effect.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.attacks.attack import option
from pathmark.attacks.blocks import copied, moe_blocks
from pathmark.attacks.grids import on_grid, round_to_grid, solve_gptq
from pathmark.attacks.kit import Kit
from pathmark.attacks.quantizers import Job, Library, quantize_folder, require
from pathmark.errors import AttackError
from pathmark.models import device_of, find_routers
from pathmark.models.suspects import load_suspect

BITS = (8, 4, 3, 2)
MULTIPLE = 32
"""Auto-round skips, without a word, weights with another number of inputs or outputs."""


@dataclass(frozen=True, kw_only=True)
class RoundToNearest:
    """Round every weight to the nearest of 2^bits values of its group."""

    bits: Literal[8, 4, 3, 2] = option(4, "Bits per weight.")
    group_size: int = option(32, "Consecutive inputs that share a scale; 0 for one scale per row.")
    symmetric: bool = option(True, "Zero point fixed in the middle, as GPTQ has it; otherwise chosen per group.")
    routers: bool = option(True, "Whether router rows are rounded too.")

    def __post_init__(self) -> None:
        _check(self.bits, self.group_size)


@dataclass(frozen=True, kw_only=True)
class Gptq:
    """Quantize with gptqmodel: roundings are chosen so that each layer's outputs on calibration text change least."""

    bits: Literal[8, 4, 3, 2] = option(4, "Bits per weight.")
    group_size: int = option(32, "Consecutive inputs that share a scale; 0 for one scale per row.")
    routers: bool = option(
        True, "Whether router rows are quantized too, which the library never does: by our own solver."
    )
    samples: int = option(128, "Calibration texts.")
    length: int = option(128, "Tokens per text, at most.")
    seed: int = option(0, "Which texts.")

    def __post_init__(self) -> None:
        _check(self.bits, self.group_size, self.samples, self.length)


@dataclass(frozen=True, kw_only=True)
class AutoRound:
    """Quantize with auto-round: roundings and clipping are trained, layer by layer, by signed gradient descent."""

    bits: Literal[8, 4, 3, 2] = option(4, "Bits per weight.")
    group_size: int = option(32, "Consecutive inputs that share a scale; 0 for one scale per row.")
    iterations: int = option(50, "Steps per layer; the library's own default is 200.")
    samples: int = option(128, "Calibration texts.")
    length: int = option(128, "Tokens per text; shorter texts are not used.")
    seed: int = option(0, "Which texts, and the order of training.")

    def __post_init__(self) -> None:
        _check(self.bits, self.group_size, self.samples, self.length)
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}")


def round_to_nearest(model: PreTrainedModel, config: RoundToNearest, kit: Kit) -> PreTrainedModel:
    """Round all weights of the decoder layers to a grid of 2^bits values per group.

    The adversary knows the weights; needs no data and no second model.
    """
    model = copied(model)
    tensors = quantizable(model, routers=config.routers)
    _check_groups(tensors, config.group_size)
    kit.progress.stage(f"round to {config.bits} bits", len(tensors))
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.copy_(round_to_grid(tensor, config.bits, config.group_size, config.symmetric))
            kit.progress.advance(1)
    return model


def gptq(model: PreTrainedModel, config: Gptq, kit: Kit) -> PreTrainedModel:
    """Quantize with GPTQ as it is done in practice: the library's own checkpoint, read back as floats.

    The adversary knows the weights; needs ordinary text of `samples` times `length` tokens. Experts that hardly any
    calibration token visits are rounded to nearest, as the library does by default. Routers, which it never touches,
    are solved for afterwards on their inputs in the quantized model.
    """
    require("gptqmodel")
    rows = kit.rows(config.samples, config.length, seed=config.seed)
    quantized = _by_library(model, "gptqmodel", config, rows, kit)
    if config.routers:
        _solve_routers(quantized, config, rows, kit)
    return quantized


def auto_round(model: PreTrainedModel, config: AutoRound, kit: Kit) -> PreTrainedModel:
    """Quantize with AutoRound, which trains its roundings; routers stay as they are.

    The adversary knows the weights; needs ordinary text of `samples` times `length` tokens, and time for training.
    """
    require("auto_round")
    for name, tensor in quantizable(model, routers=False).items():
        if any(size % MULTIPLE for size in tensor.shape[-2:]):
            raise AttackError(
                f"{name} is {tensor.shape[-2]} x {tensor.shape[-1]}; auto-round leaves alone what is no multiple of "
                f"{MULTIPLE}. Try gptq or round-to-nearest"
            )
    rows = kit.rows(config.samples, config.length, seed=config.seed, shortest=config.length)
    return _by_library(model, "auto_round", config, rows, kit)


def quantizable(model: PreTrainedModel, *, routers: bool) -> dict[str, Tensor]:
    """Name -> weight with inputs on its last axis: fused experts, Linears of the decoder layers, routers where asked.

    One-row gates (the shared expert's) and the head stay out, as with every quantizer in use.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    blocks = moe_blocks(model)
    found = [tensor for block in blocks for tensor in (block.gate_up_EGH, block.down_EHI)]
    outside = {id(model.get_output_embeddings()), *(id(block.site.projection) for block in blocks)}
    found += [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.out_features > 1 and id(module) not in outside
    ]
    if routers:
        found += [block.site.weight for block in blocks]
    return {names[id(tensor)]: tensor for tensor in found}


def _by_library(
    model: PreTrainedModel, library: Library, config: Gptq | AutoRound, rows: Sequence[tuple[int, ...]], kit: Kit
) -> PreTrainedModel:
    """The model as the library leaves it: saved, quantized in another process, read back, every tensor checked."""
    before = quantizable(model, routers=False)
    _check_groups(before, config.group_size)
    dtype, device = next(iter(before.values())).dtype, device_of(model)
    kit.progress.stage(f"{library.replace('_', '-')}, {config.bits} bits", model.config.num_hidden_layers)
    with tempfile.TemporaryDirectory(prefix="pathmark-") as name:
        folder = Path(name)
        source, target = folder / "source", folder / "target"
        model.save_pretrained(source)
        kit.tokenizer.save_pretrained(source)
        job = Job(
            library=library,
            source=str(source),
            target=str(target),
            bits=config.bits,
            group_size=config.group_size,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            rows=rows,
            iterations=config.iterations if isinstance(config, AutoRound) else 0,
            seed=config.seed,
        )
        after = load_suspect(quantize_folder(job, folder, kit.progress), dtype=torch.float32)
    _check_quantized(before, quantizable(after, routers=False), config)
    return after.to(device=device, dtype=dtype)


def _check_quantized(before: dict[str, Tensor], after: dict[str, Tensor], config: Gptq | AutoRound) -> None:
    for name, old in before.items():
        new = after.get(name)
        if new is None or new.shape != old.shape:
            raise AttackError(f"{name} did not come back from the quantizer as it went in; try round-to-nearest")
        if isinstance(config, AutoRound):  # it writes the weights in the model's own dtype; GPTQ packs integers
            new = new.to(old.dtype)
        untouched = torch.equal(new, old.to(new)) and not on_grid(old, config.bits, config.group_size)
        if untouched or not on_grid(new, config.bits, config.group_size):
            raise AttackError(
                f"{name} came back without being quantized to {config.bits} bits in groups of {config.group_size}; "
                "try another group size, or round-to-nearest"
            )


@torch.no_grad()
def _solve_routers(model: PreTrainedModel, config: Gptq, rows: Sequence[tuple[int, ...]], kit: Kit) -> None:
    """GPTQ for the routers, in place, on the inputs they have in this model."""
    routers = {site.weight_name: site.weight for site in find_routers(model)}
    _check_groups(routers, config.group_size)
    kit.progress.stage("gptq, routers", len(rows))
    for name, hessian_HH in _router_hessians(model, rows, kit).items():
        weight_EH = routers[name]
        weight_EH.copy_(solve_gptq(weight_EH, hessian_HH, config.bits, config.group_size, symmetric=True))


def _router_hessians(model: PreTrainedModel, rows: Sequence[tuple[int, ...]], kit: Kit) -> dict[str, Tensor]:
    """Weight name -> sum of x x^T over the inputs of each router; row by row, so no padding is seen."""
    sums: dict[str, Tensor] = {}

    def collect(name: str, hidden: Tensor) -> None:
        hidden_TH = hidden.reshape(-1, hidden.shape[-1]).float()
        sums[name] = sums.get(name, 0) + (hidden_TH.T @ hidden_TH).double()

    handles = [
        site.projection.register_forward_pre_hook(lambda _, args, name=site.weight_name: collect(name, args[0]))
        for site in find_routers(model)
    ]
    try:
        for row in rows:
            model(input_ids=torch.tensor([row], device=device_of(model)), use_cache=False)
            kit.progress.advance(1)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _check_groups(tensors: dict[str, Tensor], group_size: int) -> None:
    for name, tensor in tensors.items():
        if group_size and tensor.shape[-1] % group_size:
            raise AttackError(
                f"{name} has {tensor.shape[-1]} inputs, which are no multiple of the group size {group_size}; "
                "try a divisor, or 0 for one group per row"
            )


def _check(bits: int, group_size: int, samples: int = 1, length: int = 8) -> None:
    if bits not in BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, got {bits}")
    if group_size != 0 and group_size < 2:
        raise ValueError(f"group_size must be 0 (per row) or at least 2, got {group_size}")
    if samples < 1 or length < 8:
        raise ValueError(f"samples must be at least 1 and length at least 8, got {samples} and {length}")
