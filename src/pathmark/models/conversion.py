"""Which stored tensors make which parameter, and how to fill one without a second copy of it.

transformers renames, stacks and splits what the hub stores: two matrices per expert on disk are one fused
tensor in memory. Its own tables decide here as they do in `from_pretrained`; each conversion is tried on the
meta device first, so names and shapes are known to fit before a byte of weights is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)

from pathmark.errors import ModelError
from pathmark.models.headers import StoredTensor

PIECE_BYTES = 1 << 22
"""Read at once where the stored type differs from the wanted one."""
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Recipe:
    """One or more parameters, made from stored tensors by one conversion of transformers."""

    first: str
    """The parameter that transformers files the conversion under."""
    targets: tuple[str, ...]
    dtype: torch.dtype
    converter: Any
    """None where a stored tensor is the parameter, under whatever name."""
    sources: tuple[tuple[str, StoredTensor], ...]
    """(pattern of the converter, stored tensor), in the order of the experts."""


def plan_recipes(model: PreTrainedModel, stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> list[Recipe]:
    """A recipe for every parameter and persistent buffer of a model on the meta device.

    Raises ModelError where one is missing, has another shape than the config says, or is not stored plainly.
    """
    state = model.state_dict()
    conversions = get_model_conversion_mapping(model)
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    collected: dict[str, list[tuple[str, str | None]]] = {}
    for name in sorted(stored, key=dot_natural_key):  # the order in which experts are stacked
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, state)
        if target in state:
            collected.setdefault(target, []).append((name, pattern))
    keep = _kept_in_float32(model, dtype)
    recipes = []
    for first, sources in collected.items():
        wanted = torch.float32 if keep is not None and keep.search(first) else state[first].dtype
        pattern = sources[0][1]
        recipe = Recipe(
            first=first,
            targets=(first,),
            dtype=wanted,
            converter=None if pattern is None else by_pattern[pattern],
            sources=tuple((p or name, stored[name]) for name, p in sources),
        )
        recipes.append(_tried(recipe, model, state))
    return _with_tied(model, state, recipes)


def cook(recipe: Recipe, model: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters of a recipe with their weights, read with plain file reads.

    Plain reads, because pages of a mapped file count as resident memory for as long as they are cached.
    """
    if recipe.converter is None:
        return {recipe.first: read_tensor(recipe.sources[0][1], recipe.dtype)}
    if _stacks_experts(recipe):
        return {recipe.first: _stacked(recipe)}
    tensors = [(pattern, read_tensor(source, recipe.dtype)) for pattern, source in recipe.sources]
    return _convert(recipe, model, tensors)


def read_tensor(source: StoredTensor, dtype: torch.dtype) -> Tensor:
    """One stored tensor in a type of choice."""
    target = torch.empty(source.shape, dtype=dtype)
    read_into(target, source)
    return target


def read_into(target: Tensor, source: StoredTensor) -> None:
    """Fill a tensor, which may be part of a larger one, from the file; piece by piece if the type changes."""
    stored = TORCH_DTYPES[source.dtype]
    with source.file.open("rb", buffering=0) as stream:
        stream.seek(source.start)
        if target.dtype == stored and target.is_contiguous():
            _read_exactly(stream, target, source)
            return
        rows = target if target.ndim else target.unsqueeze(0)
        row_bytes = max(1, math.prod(rows.shape[1:]) * stored.itemsize)
        step = max(1, PIECE_BYTES // row_bytes)
        for first in range(0, rows.shape[0], step):
            piece = torch.empty((min(step, rows.shape[0] - first), *rows.shape[1:]), dtype=stored)
            _read_exactly(stream, piece, source)
            rows[first : first + step].copy_(piece)


def _read_exactly(stream: Any, target: Tensor, source: StoredTensor) -> None:
    bytes_N: Any = target.detach().reshape(-1).view(torch.uint8).numpy()
    view = memoryview(bytes_N)
    done = 0
    while done < len(view):
        got = stream.readinto(view[done:])
        if not got:
            raise ModelError(f"{source.file} ended while it was read; expected {source.end} bytes. Did it change?")
        done += got


def _stacks_experts(recipe: Recipe) -> bool:
    """Whether a conversion stacks experts along the first axis, and at most joins matrices of one expert."""
    operations = recipe.converter.operations
    merges = isinstance(operations[0], MergeModulelist) and operations[0].dim == 0 and len(recipe.targets) == 1
    joins = len(operations) == 2 and isinstance(operations[1], Concatenate) and operations[1].dim >= 1
    patterns = {pattern for pattern, _ in recipe.sources}
    return merges and (joins or (len(operations) == 1 and len(patterns) == 1))


def _stacked(recipe: Recipe) -> Tensor:
    """The fused tensor, filled expert by expert in place: gathering and stacking would need it twice."""
    pieces = [expert_pieces(recipe, expert) for expert in range(_count(recipe))]
    shape = list(pieces[0][0].source.shape)
    shape[pieces[0][0].axis] = sum(piece.size for piece in pieces[0])
    fused = torch.empty([len(pieces), *shape], dtype=recipe.dtype)
    for matrix, parts in zip(fused, pieces, strict=True):
        fill_expert(matrix, parts)
    return fused


@dataclass(frozen=True)
class Piece:
    """A stored matrix, and which part of an expert's fused one it is."""

    source: StoredTensor
    axis: int
    start: int
    size: int


def has_single_experts(recipe: Recipe) -> bool:
    """Whether one expert of a fused tensor can be read without the others."""
    if recipe.converter is not None:
        return _stacks_experts(recipe)
    return len(recipe.sources[0][1].shape) == 3


def expert_pieces(recipe: Recipe, expert: int) -> list[Piece]:
    """What makes up one expert of a fused tensor, in the files."""
    if recipe.converter is None:  # fused on disk too: the experts lie one behind the other
        whole = recipe.sources[0][1]
        size = (whole.end - whole.start) // whole.shape[0]
        first = whole.start + expert * size
        return [Piece(replace(whole, shape=whole.shape[1:], start=first, end=first + size), 0, 0, whole.shape[1])]
    operations = recipe.converter.operations
    axis = operations[1].dim - 1 if len(operations) == 2 else 0
    found: list[Piece] = []
    for pattern in recipe.converter.source_patterns:
        sources = [source for p, source in recipe.sources if p == pattern]
        if sources:
            start = found[-1].start + found[-1].size if found else 0
            found.append(Piece(sources[expert], axis, start, sources[expert].shape[axis]))
    return found


def fill_expert(matrix: Tensor, pieces: Iterable[Piece]) -> None:
    """Read one expert's fused matrix."""
    for piece in pieces:
        read_into(matrix.narrow(piece.axis, piece.start, piece.size), piece.source)


def _count(recipe: Recipe) -> int:
    first = recipe.sources[0][0]
    return sum(pattern == first for pattern, _ in recipe.sources)


def _convert(recipe: Recipe, model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Run the conversion as transformers does."""
    converter = deepcopy(recipe.converter)
    for (pattern, tensor), (_, source) in zip(tensors, recipe.sources, strict=True):
        converter.add_tensor(recipe.first, str(source), pattern, tensor)
    made = converter.convert(recipe.first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _tried(recipe: Recipe, model: PreTrainedModel, state: Mapping[str, Tensor]) -> Recipe:
    """The recipe with all its targets, after a dry run on the meta device."""
    for _, source in recipe.sources:
        stored = TORCH_DTYPES.get(source.dtype)
        if stored is None or stored.is_floating_point != recipe.dtype.is_floating_point:
            raise ModelError(
                f"{recipe.first} is stored as {source.dtype}, which is quantized or foreign; streaming reads plain "
                "safetensors. Load it whole (--stream never)"
            )
    dry = [(p, torch.empty(source.shape, dtype=recipe.dtype, device="meta")) for p, source in recipe.sources]
    if recipe.converter is None:
        if len(dry) > 1:
            raise ModelError(f"{recipe.first} is stored {len(dry)} times under different names; expected once")
        made = {recipe.first: dry[0][1]}
    else:
        try:
            made = _convert(recipe, model, dry)
        except Exception as error:  # torch and transformers raise what they like about shapes that don't fit
            reason = (str(error).splitlines() or [""])[0][:200]
            raise ModelError(f"the tensors stored for {recipe.first} do not make it: {reason}") from error
    for name, value in made.items():
        if name in state and value.shape != state[name].shape:
            raise ModelError(
                f"{name} is stored with shape {tuple(value.shape)}; its config says {tuple(state[name].shape)}"
            )
    return replace(recipe, targets=tuple(name for name in made if name in state))


def _kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> Any:
    """Pattern of what transformers keeps in float32 whatever was asked for, or None."""
    plan = model._get_dtype_plan(dtype)
    return build_glob_alternation(list(plan))[0] if plan else None


def _with_tied(model: PreTrainedModel, state: Mapping[str, Tensor], recipes: list[Recipe]) -> list[Recipe]:
    """A recipe of its own for every name that is tied to a stored one; a complaint if any is still missing."""
    by_name = {name: recipe for recipe in recipes for name in recipe.targets}
    partners: dict[str, set[str]] = {}
    for one, other in model.all_tied_weights_keys.items():
        partners.setdefault(one, set()).add(other)
        partners.setdefault(other, set()).add(one)
    tied = []
    missing = []
    for name in sorted(set(state) - by_name.keys()):
        stored = [by_name[p] for p in sorted(partners.get(name, ())) if p in by_name and by_name[p].converter is None]
        if stored:
            tied.append(replace(stored[0], first=name, targets=(name,)))
        else:
            missing.append(name)
    if missing:
        raise ModelError(
            f"the weight files lack {len(missing)} tensors that the config asks for, such as {missing[0]}; "
            "expected a complete checkpoint (they would be random)"
        )
    return recipes + tied
