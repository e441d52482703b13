"""GPTQ checkpoints as plain floats: integers, scales and zero points back into weights.

Verification needs the routing, not the speed of packed kernels, so the packed tensors are unpacked here and go
through the normal architecture: no GPTQ library, no GPU, and routers and experts are found as in any other model.

A packed Linear of I inputs and O outputs has `qweight` (I * bits / 32, O) and `qzeros` (groups, O * bits / 32), both
int32 that hold a stream of `bits` per number, lowest bits first; `scales` (groups, O); `g_idx` (I), the group of each
input. Its weight is scales[g] * (q - z[g]). Format `gptq` stores zero points less one, `gptq_v2` as they are.

Shape suffixes: I inputs, O outputs, G groups, W packed words.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pathmark.errors import ModelError
from pathmark.models.loading import check_safetensors

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""Checkpoint format -> what is added to stored zero points."""
_BITS = (2, 3, 4, 8)


def dequantize_gptq(folder: Path, settings: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every tensor of a GPTQ folder under its plain name, packed Linears as `.weight` in `dtype`."""
    kind = str(settings.get("checkpoint_format") or settings.get("format") or "gptq")
    if kind not in _FORMATS:
        raise ModelError(f"{folder} is packed as {kind!r}; expected {' or '.join(_FORMATS)}. Try converting it to gptq")
    if settings.get("pack_dtype", "int32") != "int32":
        raise ModelError(f"{folder} packs into {settings['pack_dtype']}; expected int32")
    packed: dict[str, dict[str, Tensor]] = {}
    plain: dict[str, Tensor] = {}
    for file in check_safetensors(folder):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  safe_open is no mapping
                owner, _, part = name.rpartition(".")
                tensor = tensors.get_tensor(name)
                if part not in _PARTS:
                    plain[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
                    continue
                parts = packed.setdefault(owner, {})
                parts[part] = tensor
                if len(parts) == len(_PARTS):  # unpacked at once: packed and plain never lie in memory together
                    plain[f"{owner}.weight"] = dequantize_linear(owner, parts, _FORMATS[kind]).to(dtype)
                    packed.pop(owner)
    if packed:
        owner, parts = next(iter(packed.items()))
        lacking = [part for part in _PARTS if part not in parts]
        raise ModelError(f"{folder}: {owner} lacks {', '.join(lacking)}; expected a complete GPTQ checkpoint")
    return plain


def dequantize_linear(name: str, parts: Mapping[str, Tensor], zero_offset: int) -> Tensor:
    """(O, I) weight of one packed Linear in float32. The number of bits follows from the shapes."""
    qweight_WO, qzeros_GW, scales_GO, g_idx_I = (parts[part] for part in _PARTS)
    if {qweight_WO.dtype, qzeros_GW.dtype, g_idx_I.dtype} != {torch.int32} or not scales_GO.is_floating_point():
        raise ModelError(f"{name}: expected packed int32 and floating-point scales, got {qweight_WO.dtype} and others")
    if g_idx_I.ndim != 1 or not qweight_WO.ndim == qzeros_GW.ndim == scales_GO.ndim == 2 or not len(g_idx_I):
        raise ModelError(f"{name}: packed tensors of the wrong dimensions; expected a GPTQ Linear")
    inputs, outputs, groups = len(g_idx_I), qweight_WO.shape[1], len(scales_GO)
    bits, rest = divmod(32 * len(qweight_WO), inputs)
    fits = qzeros_GW.shape == (groups, -(-outputs * bits // 32)) and scales_GO.shape == (groups, outputs)
    if rest or bits not in _BITS or not fits:
        raise ModelError(
            f"{name}: qweight {tuple(qweight_WO.shape)}, qzeros {tuple(qzeros_GW.shape)}, scales "
            f"{tuple(scales_GO.shape)} and {inputs} inputs do not fit together in 2, 3, 4 or 8 bits"
        )
    if g_idx_I.min() < 0 or g_idx_I.max() >= groups:
        raise ModelError(f"{name}: g_idx names group {int(g_idx_I.max())} of {groups}")
    q_IO = _unpack(qweight_WO, bits, inputs).float()
    zeros_GO = (_unpack(qzeros_GW.T, bits, outputs).T + zero_offset).float()
    group_I = g_idx_I.long()
    weight_IO = scales_GO.float()[group_I] * (q_IO - zeros_GO[group_I])
    return weight_IO.T.contiguous()


def _unpack(words_WN: Tensor, bits: int, count: int) -> Tensor:
    """(count, N) numbers from a stream of `bits` each along the first axis; 3-bit numbers may cross words."""
    place = torch.arange(count) * bits
    low = words_WN.long() & 0xFFFFFFFF
    after = torch.cat([low[1:], torch.zeros_like(low[:1])])
    word, shift = place // 32, (place % 32).unsqueeze(1)
    # Shifted apart: a 64-bit pair would lose its sign bit.
    value = (low[word] >> shift) | torch.where(shift > 32 - bits, after[word] << (32 - shift), 0)
    return value & ((1 << bits) - 1)
