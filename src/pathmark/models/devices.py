"""Where a model runs, and how wide its weights are there.

Weights in 16 bits keep their routers in 32: routing is what is measured and trained, and ties between experts are
common in 16. Whatever is trained has a copy in 32 bits besides (training/masters.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pathmark.errors import ModelError
from pathmark.models.headers import DTYPE_BITS
from pathmark.models.loading import load_model, local_folder, parameters_on_disk, stored_weights
from pathmark.models.ranks import announced, local_rank
from pathmark.models.routers import find_routers

DType = Literal["auto", "bf16", "fp32"]
ROOM = 0.8
"""Share of a device's free memory that weights may take; a model that needs more is spread over all devices."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The device and the type that are asked for."""

    device: str = "auto"
    """`auto` takes the first accelerator there is; or cpu, cuda, cuda:1, mps. Of several processes on a machine, each
    takes the CUDA device of its number there."""
    dtype: DType = "auto"
    """`auto` keeps bf16 checkpoints in bf16 on accelerators; everything else is in 32 bits."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device) or self.dtype not in (
            "auto",
            "bf16",
            "fp32",
        ):
            raise ModelError(
                f"expected a device of auto, cpu, cuda, cuda:N or mps and a type of auto, bf16 or fp32, "
                f"got {self.device} and {self.dtype}"
            )

    def chosen(self) -> torch.device:
        """The device that is meant; an error if it is not there."""
        device = torch.device(_first_accelerator() if self.device == "auto" else self.device)
        if device.type == "cuda" and announced() > 1:
            if ":" in self.device:
                raise ModelError(
                    f"{announced()} processes need a device each, got {device} for all of them; try --device cuda"
                )
            device = torch.device("cuda", local_rank())
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ModelError(
                f"there is no {device}: torch sees {torch.cuda.device_count()} CUDA devices; try --device cpu"
            )
        if device.type == "mps" and not torch.backends.mps.is_available():
            raise ModelError("there is no mps device here; try --device cpu")
        return device

    def confined(self) -> Placement:
        """The same for the process that reads strangers' files, which has no way to accelerators."""
        if self.device not in ("auto", "cpu"):
            raise ModelError(
                f"the sandbox has no way to {self.device}; try --device cpu, or --no-sandbox if you trust it"
            )
        return replace(self, device="cpu")

    def width(self, folder: Path) -> torch.dtype:
        """The type in which this folder's weights are held."""
        if self.dtype != "auto":
            return torch.bfloat16 if self.dtype == "bf16" else torch.float32
        bf16 = self.chosen().type != "cpu" and {t.dtype for t in stored_weights(folder).values()} == {"BF16"}
        return torch.bfloat16 if bf16 else torch.float32

    def spread(self, need: int) -> bool:
        """Whether weights of so many bytes go over all devices: `auto`, several of them, and too much for the first.

        Never where several processes have a device each.
        """
        alone = self.device == "auto" and announced() == 1
        several = alone and torch.cuda.is_available() and torch.cuda.device_count() > 1
        return several and need > ROOM * torch.cuda.mem_get_info(0)[0]


def _first_accelerator() -> str:
    if torch.cuda.is_available():
        return "cuda" if announced() > 1 else "cuda:0"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def open_model(
    name: Any, placement: Placement | None = None, *, config: Any | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal LM in eval mode where it was asked for; routers are always in 32 bits."""
    placement = placement or Placement()
    device, folder = placement.chosen(), None if trust_remote_code else local_folder(name)
    dtype = torch.float32 if folder is None else placement.width(folder)
    need = 0 if folder is None else parameters_on_disk(folder) * dtype.itemsize
    where = {"device_map": "auto"} if placement.spread(need) else {}
    model = load_model(name, dtype=dtype, config=config, trust_remote_code=trust_remote_code, **where)
    if where and dtype != torch.float32:
        widen_routers(model)
    return model if where else settled(model, device)


def settled(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A model on its device, its routers in 32 bits."""
    if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in model.parameters()):
        widen_routers(model)
    return model.to(device)


def widen_routers(model: nn.Module) -> None:
    """Routers in 32 bits inside a narrower model: they widen what comes in; what they decide goes out as it is."""
    for site in find_routers(model):
        site.router.float()
        site.router.register_forward_pre_hook(_widened, with_kwargs=True)


def _widened(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(wide, args)), {name: wide(value) for name, value in kwargs.items()}


def refuse_narrower(folder: Path, placement: Placement) -> None:
    """A copy must not lose digits everywhere: refused where the weights are stored wider than they would be held."""
    bits = 8 * placement.width(folder).itemsize
    widest = max(DTYPE_BITS[tensor.dtype] for tensor in stored_weights(folder).values())
    if widest > bits:
        raise ModelError(
            f"{folder} is stored in {widest} bits; held in {bits} all of its weights would change. Try --dtype fp32"
        )
