"""A suspect in whatever form it is found, as one plain model: folders in any dtype, adapters, quantized checkpoints.

Verification reads routers and experts; so adapters are merged and packed weights are unpacked in memory, and what
comes out is the normal architecture in floats. Nothing may be missing, left over or silently random: each kind is
checked for that on its own, because libraries only warn.
"""

from __future__ import annotations

import json
import os
import re
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from pathmark.errors import ModelError
from pathmark.models.gptq import dequantize_gptq
from pathmark.models.loading import check_safetensors, load_config, load_model, local_folder, refuse_odd_files
from pathmark.models.weights import refuse_bad_weights

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_SPLIT_EXPERT = re.compile(r"(.*experts)\.\d+\.(?:gate|up|down)_proj\.weight")
_PLAIN_NAME = re.compile(r"\^?[\w.\\]+\$?")
_MAX_CONFIG = 1 << 22
"""Bytes of an adapter's config; real ones have a few kilobytes."""


def load_suspect(
    name: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = torch.float32,
    config: Any | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Any suspect as a causal LM in eval mode with float weights.

    A Hugging Face folder or hub id in any dtype, a GPTQ checkpoint (unpacked by ourselves), a bitsandbytes
    checkpoint (through transformers, then unpacked), or the folder of a peft LoRA adapter on `base`. `config` replaces
    the folder's own.
    """
    if is_adapter(name):
        model = _load_adapter(Path(name), base, dtype, trust_remote_code)
    elif base is not None:
        raise ModelError(f"{name} is no peft adapter (it has no {ADAPTER_CONFIG}), so it takes no base")
    else:
        model = _load(name, config or load_config(name, trust_remote_code=trust_remote_code), dtype, trust_remote_code)
    refuse_bad_weights(model)
    return model


def is_adapter(name: str | os.PathLike[str]) -> bool:
    """Whether a name is the folder of a peft adapter."""
    return (Path(name) / ADAPTER_CONFIG).is_file()


def _load(
    name: str | os.PathLike[str], config: Any, dtype: torch.dtype | None, trust_remote_code: bool
) -> PreTrainedModel:
    settings = _quantization(config)
    method = settings.get("quant_method")
    if not settings:
        return load_model(name, dtype=dtype, config=config, trust_remote_code=trust_remote_code)
    if method == "gptq":
        return _load_gptq(name, config, dtype or torch.float32, trust_remote_code)
    if method == "bitsandbytes":
        return _load_bitsandbytes(name, config, dtype or torch.float32, trust_remote_code)
    raise ModelError(
        f"{name} is quantized with {method!r}; expected gptq, bitsandbytes or plain weights. "
        "Record its routes where it runs and use `pathmark verify-routes`"
    )


def _quantization(config: Any) -> dict[str, Any]:
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return {}
    return stated if isinstance(stated, dict) else dict(stated.to_dict())


def _load_gptq(
    name: str | os.PathLike[str], config: Any, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    folder, settings, config = local_folder(name), _quantization(config), deepcopy(config)
    del config.quantization_config  # the weights below are plain
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    state = _fuse_experts(dequantize_gptq(folder, settings, dtype), skeleton)
    try:
        model, report = type(skeleton).from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{name} could not be loaded: {_first_line(error)}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, report.get(problem, ()))):
            raise ModelError(
                f"{name}: {len(names)} {problem.replace('_', ' ')} after unpacking, such as {names[0]}; "
                "its layout is not one that is known. Record its routes where it runs and use `pathmark verify-routes`"
            )
    assert isinstance(model, PreTrainedModel)
    return model.eval()


def _fuse_experts(state: dict[str, Tensor], skeleton: nn.Module) -> dict[str, Tensor]:
    """Experts that were split for quantization, put together as the architecture holds them.

    Quantizers name the parts by the modules in memory (`experts.3.gate_proj`); for families whose hub layout has
    other names (Mixtral's `block_sparse_moe.experts.3.w1`) transformers would not recognise them.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    split = {match[1] for match in map(_SPLIT_EXPERT.fullmatch, state) if match}
    for owner in sorted(split):
        fused = f"{owner}.gate_up_proj"
        shape = shapes.get(fused, ())
        if len(shape) != 3:  # a family that keeps its experts in another way; transformers converts what it knows
            continue
        parts = {
            kind: [state.pop(f"{owner}.{expert}.{kind}_proj.weight", None) for expert in range(shape[0])]
            for kind in ("gate", "up", "down")
        }
        found = {kind: [tensor for tensor in tensors if tensor is not None] for kind, tensors in parts.items()}
        if any(len(tensors) != shape[0] or len({t.shape for t in tensors}) != 1 for tensors in found.values()):
            raise ModelError(f"{owner}: expected {shape[0]} experts of one shape with gate, up and down projections")
        together = torch.cat([torch.stack(found["gate"]), torch.stack(found["up"])], dim=1)
        down = torch.stack(found["down"])
        if tuple(together.shape) != shape or tuple(down.shape) != shapes.get(f"{owner}.down_proj"):
            raise ModelError(f"{owner}: unpacked experts have shape {tuple(together.shape)}, expected {shape}")
        state[fused], state[f"{owner}.down_proj"] = together, down
    return state


def _load_bitsandbytes(
    name: str | os.PathLike[str], config: Any, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    if find_spec("bitsandbytes") is None:
        raise ModelError(f"{name} is quantized with bitsandbytes; install it to load the checkpoint")
    model: Any = load_model(name, dtype=dtype, config=config, trust_remote_code=trust_remote_code)
    try:
        plain = model.dequantize()
    except (ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise ModelError(f"{name} could not be unpacked by bitsandbytes: {_first_line(error)}") from error
    assert isinstance(plain, PreTrainedModel)
    return plain.to(dtype).eval()


def _load_adapter(
    folder: Path, base: str | os.PathLike[str] | None, dtype: torch.dtype | None, trust_remote_code: bool
) -> PreTrainedModel:
    """The base with the adapter merged in. Only LoRA, only safetensors, and every tensor must find its place."""
    refuse_odd_files(folder)
    stated = _adapter_config(folder)
    weights = folder / ADAPTER_WEIGHTS
    if not weights.is_file():
        raise ModelError(f"{folder} has no {ADAPTER_WEIGHTS}; adapters are read from safetensors only, never pickles")
    check_safetensors(folder)
    state = load_file(weights)
    _refuse_odd_tensors(folder, stated, state)
    if base is None:  # the one that its config names is the suspect's choice, and may lead anywhere
        named = str(stated.get("base_model_name_or_path"))[:80]
        raise ModelError(f"{folder} is a peft adapter; give its base model with --base (it names {named!r} itself)")
    try:
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    except ImportError:
        raise ModelError(f"{folder} is a peft adapter; install peft (pathmark[lora]) to load it") from None
    model = load_suspect(base, dtype=dtype, trust_remote_code=trust_remote_code)
    try:
        known = {name: value for name, value in stated.items() if name in LoraConfig.__dataclass_fields__}
        known |= {"target_modules": _modules(folder, stated, state), "base_model_name_or_path": os.fspath(base)}
        config = LoraConfig(**{**known, "inference_mode": True})
        wrapped = get_peft_model(model, config)
        result = set_peft_model_state_dict(wrapped, state)
        lost = sorted(result.unexpected_keys) + sorted(key for key in result.missing_keys if "lora_" in key)
        if lost:
            raise ModelError(f"{len(lost)} tensors do not fit {os.fspath(base)}, such as {lost[0]}")
        merged = wrapped.merge_and_unload(safe_merge=True)
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise ModelError(f"{folder} cannot be merged into its base: {_first_line(error)}") from error
    assert isinstance(merged, PreTrainedModel)
    return merged.eval()


def _adapter_config(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    if path.stat().st_size > _MAX_CONFIG:
        raise ModelError(f"{path} has more than {_MAX_CONFIG} bytes; expected a peft config")
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"{path} is no JSON object: {_first_line(error)}") from None
    if not isinstance(stated, dict):
        raise ModelError(f"{path} is no JSON object; expected a peft config")
    if stated.get("peft_type") != "LORA":
        raise ModelError(f"{folder} is an adapter of type {stated.get('peft_type')!r}; expected LORA. Merge it first")
    return stated


def _modules(folder: Path, stated: dict[str, Any], state: dict[str, Tensor]) -> Any:
    """Which modules are adapted, without running a pattern of the suspect's: some take for ever.

    Where the config has a pattern, the names of the tensors say the same.
    """
    patterns = [stated.get("exclude_modules"), stated.get("layers_pattern")]
    for field in ("rank_pattern", "alpha_pattern"):
        patterns += list(stated.get(field) or {})
    for pattern in patterns:
        if isinstance(pattern, str) and not _PLAIN_NAME.fullmatch(pattern):
            raise ModelError(
                f"{folder} chooses modules by the pattern {pattern[:80]!r}; expected names. Merge it first"
            )
    wanted = stated.get("target_modules")
    if not isinstance(wanted, str):
        return wanted
    names = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in state if ".lora_" in name}
    bare = tuple(str(name).rpartition(".")[0] for name in stated.get("target_parameters") or ())
    return sorted(name for name in names if not bare or not name.endswith(bare))  # those are adapted as parameters


def _refuse_odd_tensors(folder: Path, stated: dict[str, Any], state: dict[str, Tensor]) -> None:
    """No NaN, no empty adapter, and no rank beyond the tensors' own: peft would allocate whatever it is told."""
    if not state:
        raise ModelError(f"{folder}/{ADAPTER_WEIGHTS} holds no tensors")
    for name, tensor in state.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ModelError(f"{folder}: {name} holds NaN or inf")
    pattern = stated.get("rank_pattern") or {}
    ranks = [stated.get("r", 8), *(pattern.values() if isinstance(pattern, dict) else [None])]
    largest = max(max(tensor.shape, default=0) for tensor in state.values())
    if not all(type(rank) is int and 0 < rank <= largest for rank in ranks):
        raise ModelError(f"{folder} asks for ranks {ranks[:3]}, its largest tensor has {largest} rows or columns")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
