"""A model larger than memory: each decoder layer has weights only while it runs.

The model is built on the meta device. When a layer is called its weights are read from the safetensors files,
all rows of the batch pass through it in pieces, and it goes back to meta. One forward pass over all probes
therefore reads every layer once; `record_routing(..., stop_early=True)` never reads the layers above the last
wanted one, nor the head.

Shape suffixes: B batch, T tokens, H hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.errors import ModelError
from pathmark.models.conversion import TORCH_DTYPES, Recipe, cook, plan_recipes
from pathmark.models.diskexperts import DiskExperts, fused_leaves
from pathmark.models.loading import load_config, local_folder, parameters_on_disk, refuse_quantized, stored_weights
from pathmark.models.routers import find_routers
from pathmark.models.skeleton import build_skeleton
from pathmark.models.upper import body, layer_stack
from pathmark.models.weights import is_finite

TOKENS_AT_ONCE = 1024
"""Tokens that pass through a layer together, unless rows_at_once says otherwise."""
TOKENS_PER_READING = 4096
"""As many where every call reads its experts from disk."""
HEAD_ROWS = 16_384
"""Of the head that are widened at once."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Tail:
    """The upper part of a streamed model, which can be trained: in memory, but for its experts."""

    first: int
    """The lowest layer of it."""
    experts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Layer -> experts that are in memory too, because they change."""


def should_stream(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = torch.float32,
    copies: int = 1,
    config: Any | None = None,
    trust_remote_code: bool = False,
) -> bool:
    """Whether the weights of so many such models, in the type they would be loaded in, exceed half of the free memory.

    Never for quantized ones, which can only be loaded whole.
    """
    folder = local_folder(name)
    config = config or load_config(folder, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        return False
    if dtype is None:
        need = sum(entry.end - entry.start for entry in stored_weights(folder).values())
    else:
        need = parameters_on_disk(folder) * dtype.itemsize
    return bool(copies * need > psutil.virtual_memory().available / 2)


def stream_model(
    name: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = torch.float32,
    config: Any | None = None,
    trust_remote_code: bool = False,
    rows_at_once: int | None = None,
    tail: Tail | None = None,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """A causal LM that reads its layers from safetensors while it runs, in eval mode, on the CPU.

    Routing is that of `load_model` with the same dtype; None keeps the checkpoint's own, which halves the
    memory of a bf16 checkpoint and is several times slower on most CPUs. `progress(done, layers)` is called
    after each layer that ran. Weights that hold NaN or inf raise ModelError when their layer is read.

    With a `tail` the layers from there on are in memory and can be trained. Experts, above and below, are read one by
    one when tokens visit them; only those that the tail names have parameters. The head is in memory as it is stored.
    """
    folder = local_folder(name)
    config = config or load_config(folder, trust_remote_code=trust_remote_code)
    refuse_quantized(folder, config)
    stored = stored_weights(folder)
    dtype = dtype or _own_dtype(config, [entry.dtype for entry in stored.values()])
    model = build_skeleton(name, config, trust_remote_code, dtype)
    recipes = plan_recipes(model, stored, dtype)
    model.eval().requires_grad_(False)
    _fill_computed_buffers(model)
    stack_name, stack = _layers(model)
    inside = _name_of(model, body(model))
    layers: dict[int, list[Recipe]] = {i: [] for i in range(len(stack))}
    resident: list[Recipe] = []
    late: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        if recipe.first.startswith(f"{stack_name}."):
            layers[int(recipe.first.removeprefix(f"{stack_name}.").split(".")[0])].append(recipe)
        elif recipe.first.startswith(f"{inside}.") or "." not in recipe.first:
            resident.append(recipe)
        else:
            late.setdefault(recipe.first.split(".")[0], []).append(recipe)
    if tail is not None:
        _leave_experts_on_disk(model, layers, tail)
    _check_memory(name, layers, resident)
    _load(model, "", _narrow_embedding(model, resident, dtype), model)
    for part, theirs in late.items():  # the head: read if it is ever called, which a recording never does
        if tail is not None and _narrow_head(model, part, theirs):
            continue
        _Streamed(model, model.get_submodule(part), f"{part}.", theirs).install(None)
    for number, layer in enumerate(stack):
        prefix, theirs = f"{stack_name}.{number}.", layers[number]
        if tail is not None and number >= tail.first:
            _load(layer, prefix, theirs, model)
            layer.requires_grad_(True)
        else:
            streamed = _Streamed(model, layer, prefix, theirs, TOKENS_AT_ONCE if tail is None else TOKENS_PER_READING)
            streamed.install(rows_at_once, _report(progress, number + 1, len(stack)))
    vars(model)["streamed_from"] = folder
    return model


@contextmanager
def layer_weights(model: nn.Module, layer: int) -> Iterator[None]:
    """Inside the block a layer has its weights, whether the model is streamed or not."""
    if not is_streamed(model):
        yield
        return
    _, stack = _layers(model)
    streamed = getattr(vars(stack[layer]).get("forward"), "streamed", None)
    with streamed.weights() if streamed is not None else nullcontext():  # a layer of the tail has them all the time
        yield


def is_streamed(model: nn.Module) -> bool:
    """Whether a model came from `stream_model`."""
    return "streamed_from" in vars(model)


def streamed_from(model: nn.Module) -> Path | None:
    """The folder that a streamed model reads from; None for one that is in memory."""
    return vars(model).get("streamed_from")


class _Streamed:
    """One part of the model that has weights only inside `weights()`."""

    def __init__(
        self,
        model: PreTrainedModel,
        module: nn.Module,
        prefix: str,
        recipes: Sequence[Recipe],
        tokens_at_once: int = TOKENS_AT_ONCE,
    ) -> None:
        self.model, self.tokens_at_once = model, tokens_at_once
        self.module = module
        self.prefix = prefix
        self.recipes = recipes
        self.empty = {name: tensor.to("meta") for name, tensor in module.state_dict().items()}
        self.users = 0

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Weights inside the block, meta tensors after it, however it ends."""
        try:
            self.users += 1
            if self.users == 1:
                _load(self.module, self.prefix, self.recipes, self.model)
            yield
        finally:
            self.users -= 1
            if not self.users:
                self.module.load_state_dict(self.empty, assign=True)

    def install(self, rows_at_once: int | None, done: Callable[[], None] | None = None) -> None:
        """Put ourselves before the module's forward."""
        plain = self.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                with torch.no_grad(), self.weights():
                    return _by_rows(plain, args, kwargs, rows_at_once, self.tokens_at_once)
            finally:  # a recording leaves its last layer by an exception
                if done is not None:
                    done()

        forward.streamed = self  # type: ignore[attr-defined]
        self.module.forward = forward


def _by_rows(
    forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows_at_once: int | None, tokens_at_once: int
) -> Any:
    """Call with some rows of the batch at a time and join what comes back.

    A call that takes anything whose batch axis is not plain (a cache, a table that layers share) runs whole.
    """
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, Tensor) or hidden.ndim < 3 or not _divisible([*args, *kwargs.values()]):
        return forward(*args, **kwargs)
    n_rows, n_tokens = hidden.shape[:2]
    step = rows_at_once or max(1, tokens_at_once // n_tokens)
    if step >= n_rows:
        return forward(*args, **kwargs)
    outputs = []
    for start in range(0, n_rows, step):
        rows = slice(start, start + step)
        some = [_rows_of(value, rows, n_rows, n_tokens) for value in args]
        named = {name: _rows_of(value, rows, n_rows, n_tokens) for name, value in kwargs.items()}
        outputs.append(forward(*some, **named))
    return _joined(outputs)


def _divisible(values: Sequence[Any]) -> bool:
    plain = (Tensor, bool, int, float, str, torch.dtype, torch.device)
    return all(
        value is None or isinstance(value, plain) or (isinstance(value, tuple | list) and _divisible(value))
        for value in values
    )


def _rows_of(value: Any, rows: slice, n_rows: int, n_tokens: int) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_rows_of(part, rows, n_rows, n_tokens) for part in value)
    if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[0] != n_rows:
        return value
    # (tokens, x) tables look like (batch, x) ones where there are as many rows as tokens
    return value if value.ndim == 2 and value.shape[1] != n_tokens else value[rows]


def _joined(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs)
    if isinstance(first, tuple):
        return tuple(_joined([output[i] for output in outputs]) for i in range(len(first)))
    if first is None:
        return None
    raise ModelError(f"a layer gave back a {type(first).__name__}; streaming joins tensors. Load the model whole")


def _load(module: nn.Module, prefix: str, recipes: Sequence[Recipe], model: PreTrainedModel) -> None:
    """Read the recipes' parameters into a module; nothing that is not finite gets in."""
    for recipe in recipes:
        made = cook(recipe, model)
        for name in recipe.targets:
            if not is_finite(made[name]):
                raise ModelError(f"{name} holds NaN or inf; expected finite weights. No verdict on such a model")
        module.load_state_dict(
            {name.removeprefix(prefix): made[name] for name in recipe.targets}, assign=True, strict=False
        )


def _fill_computed_buffers(model: PreTrainedModel) -> None:
    """Real values for what no checkpoint stores, rotary frequencies above all, as `from_pretrained` does it."""
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    for name, buffer in model.named_non_persistent_buffers():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = torch.empty_like(buffer, device="cpu")
    for module in model.modules():
        module._is_hf_initialized = False
    model.initialize_weights()


def _narrow_embedding(model: PreTrainedModel, recipes: list[Recipe], dtype: torch.dtype) -> list[Recipe]:
    """Keep a plain embedding in its stored type and widen its output: the same numbers in half the memory."""
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding:
        return recipes
    name = f"{_name_of(model, embedding)}.weight"
    kept = []
    for recipe in recipes:
        stored = TORCH_DTYPES[recipe.sources[0][1].dtype]
        if recipe.first == name and recipe.converter is None and stored.itemsize < dtype.itemsize:
            embedding.register_forward_hook(lambda module, args, output: output.to(dtype))
            kept.append(replace(recipe, dtype=stored))
        else:
            kept.append(recipe)
    return kept


def _narrow_head(model: PreTrainedModel, part: str, recipes: Sequence[Recipe]) -> bool:
    """Keep a plain head in its stored type and widen it piece by piece as it is used; False if it is another kind."""
    head: Any = model.get_submodule(part)
    recipe = recipes[0]
    plain = type(head) is nn.Linear and len(recipes) == 1 and recipe.converter is None  # a bias would be a second one
    if not plain or head is not model.get_output_embeddings():
        return False
    _load(head, f"{part}.", [replace(recipe, dtype=TORCH_DTYPES[recipe.sources[0][1].dtype])], model)

    def forward(hidden: Tensor) -> Tensor:
        return torch.cat([F.linear(hidden, rows.to(hidden.dtype)) for rows in head.weight.split(HEAD_ROWS)], dim=-1)

    head.forward = forward
    return True


def _leave_experts_on_disk(model: PreTrainedModel, layers: dict[int, list[Recipe]], tail: Tail) -> None:
    """Put a reader before every experts module, and take what it reads out of the layers' recipes."""
    for site in find_routers(model):
        name = "" if site.experts is None else _name_of(model, site.experts)
        fused = fused_leaves(name, site.experts, layers[site.layer])
        if not fused or site.experts is None:
            raise ModelError(
                f"the experts of layer {site.layer} cannot be read one by one from these files; expected fused or "
                "numbered experts. Try a machine with more memory and --stream never"
            )
        DiskExperts(site.experts, fused, tail.experts.get(site.layer, ()))
        read = list(fused.values())
        layers[site.layer] = [recipe for recipe in layers[site.layer] if recipe not in read]


def _check_memory(name: str | os.PathLike[str], layers: dict[int, list[Recipe]], resident: list[Recipe]) -> None:
    largest = max(sum(map(_bytes, recipes)) for recipes in layers.values())
    need, free = largest + sum(map(_bytes, resident)), psutil.virtual_memory().available
    if need > free:
        raise ModelError(
            f"{name} needs {need / 1e9:.1f} GB for its embedding and largest layer, {free / 1e9:.1f} GB are free; "
            "try the checkpoint's own dtype, or a larger machine"
        )


def _bytes(recipe: Recipe) -> int:
    elements = sum(int(torch.Size(source.shape).numel()) for _, source in recipe.sources)
    return elements * recipe.dtype.itemsize


def _own_dtype(config: Any, stored: Sequence[str]) -> torch.dtype:
    """The type that the checkpoint says it has, or else the one that most of its tensors have."""
    said = getattr(config, "dtype", None)
    if isinstance(said, torch.dtype):
        return said
    return TORCH_DTYPES.get(max(set(stored), key=stored.count), torch.float32)


def _layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    stack = layer_stack(model, find_routers(model)[0])
    return _name_of(model, stack), stack


def _name_of(model: nn.Module, part: nn.Module) -> str:
    return next(str(name) for name, module in model.named_modules() if module is part)


def _report(progress: Progress | None, done: int, total: int) -> Callable[[], None] | None:
    return None if progress is None else (lambda: progress(done, total))
