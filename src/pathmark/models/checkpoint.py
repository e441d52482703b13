"""Changed weights, as a small file and as a whole model folder.

A marked model is its base plus the tensors that changed, in the hub's own layout. `write_delta` keeps only
those; `apply_delta` copies the base and overwrites their bytes in place, so everything else is the base's, byte
for byte, in the same shards.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from pathmark.errors import ModelError
from pathmark.keys.safefile import write_private
from pathmark.models.headers import StoredTensor, read_header
from pathmark.models.loading import check_safetensors

DELTA_FORMAT = "pathmark-delta-v1"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pickle", "*.pkl")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder, from the headers alone."""
    return {name: entry for file in check_safetensors(folder) for name, entry in read_header(file).items()}


def base_digest(folder: Path) -> str:
    """sha256 over names and digests of the weight files: the base that a delta belongs to."""
    total = sha256()
    for file in check_safetensors(folder):
        digest = sha256()
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
        total.update(f"{file.name}\0{digest.hexdigest()}\n".encode())
    return total.hexdigest()


def changed_tensors(model: PreTrainedModel, names: Iterable[str], base: Path) -> dict[str, Tensor]:
    """The named parameters in the hub's layout and the base's dtype, without those that did not change."""
    wanted = set(names)
    state = {name: tensor for name, tensor in model.state_dict().items() if name in wanted}
    if missing := wanted - set(state):
        raise ModelError(f"parameter {sorted(missing)[0]} is not in the model's state")
    stored = stored_tensors(base)
    changed: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory(prefix="pathmark-") as scratch:
        # transformers alone knows how its fused parameters are named and split on disk
        model.save_pretrained(scratch, state_dict=state)
        for file in sorted(Path(scratch).glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  safe_open is no mapping
                    if name not in stored:
                        raise ModelError(f"{name} is not in {base}; its layout is not the one transformers writes")
                    here = stored[name]
                    if here.dtype not in _DTYPES:
                        raise ModelError(f"{name} is stored as {here.dtype}; expected {', '.join(_DTYPES)}")
                    value = tensors.get_tensor(name).to(_DTYPES[here.dtype])
                    if tuple(value.shape) != here.shape:
                        raise ModelError(f"{name} has shape {tuple(value.shape)}, its base {here.shape}")
                    if _bytes(value) != _read(here):
                        changed[name] = value.contiguous()
    return changed


def write_delta(path: Path, tensors: Mapping[str, Tensor], digest: str) -> None:
    """The changed tensors as one safetensors file that names its base; appears whole or not at all."""
    if path.exists():
        raise ModelError(f"{path} already exists; choose another name")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        save_file(dict(tensors), partial, metadata={"format": "pt", "pathmark": DELTA_FORMAT, "base": digest})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_delta(path: Path) -> tuple[dict[str, Tensor], str]:
    """The changed tensors and the digest of the base they belong to."""
    if not path.is_file():
        raise ModelError(f"{path} does not exist; expected a delta written by `pathmark embed --delta`")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors has one Rust exception type of its own
        raise ModelError(f"{path} is not a sound safetensors file: {error}") from None
    if metadata.get("pathmark") != DELTA_FORMAT:
        raise ModelError(f"{path} is not a delta; expected format {DELTA_FORMAT}, got {metadata.get('pathmark')}")
    return tensors, metadata["base"]


def write_folder(
    base: Path,
    tensors: Mapping[str, Tensor],
    out: Path,
    progress: Callable[[str], None] | None = None,
    *,
    private: Mapping[str, bytes] | None = None,
) -> None:
    """A copy of the base with these tensors in place of its own; `out` appears whole or not at all.

    `private` are files, by name, that hold a secret: their owner alone may read them.
    """
    stored = stored_tensors(base)
    _check_fit(tensors, stored)
    if out.exists():
        raise ModelError(f"{out} already exists; choose another name, nothing is overwritten")
    need = sum(p.stat().st_size for p in base.rglob("*") if p.is_file())
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < need:
        raise ModelError(f"{out.parent} has {free / 1e9:.1f} GB free, the model needs {need / 1e9:.1f} GB")
    with _staged(out) as stage:
        shutil.copytree(base, stage, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*PICKLES, ".git", ".cache"))
        for name, value in tensors.items():
            place = stored[name]
            file = stage / place.file.name
            file.chmod(0o644)  # a read-only base must not give an unwritable copy
            with file.open("r+b") as stream:
                stream.seek(place.start)
                stream.write(_bytes(value))
            if progress is not None:
                progress(name)
        for name, data in (private or {}).items():
            write_private(stage / name, data, replace=True)
        for file in stage.glob("*.safetensors"):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())


def write_model(model: PreTrainedModel, tokenizer: Any, out: Path) -> None:
    """A model of whatever shapes as a new folder, in the hub's layout; `out` appears whole or not at all."""
    if out.exists():
        raise ModelError(f"{out} already exists; choose another name, nothing is overwritten")
    out.parent.mkdir(parents=True, exist_ok=True)
    with _staged(out) as stage:
        model.save_pretrained(stage)
        tokenizer.save_pretrained(stage)


def apply_delta(base: Path, delta: Path, out: Path, progress: Callable[[str], None] | None = None) -> None:
    """Rebuild a marked folder from its base and its delta; refuses another base."""
    tensors, digest = read_delta(delta)
    found = base_digest(base)
    if found != digest:
        raise ModelError(
            f"{delta} belongs to another base (weights {digest[:12]}...), {base} has {found[:12]}...; "
            "give the folder that was marked"
        )
    write_folder(base, tensors, out, progress)


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes it at the end of the block, or vanishes."""
    stage = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
    stage.mkdir()
    try:
        yield stage
        stage.rename(out)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _check_fit(tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
    for name, value in tensors.items():
        place = stored.get(name)
        if place is None or tuple(value.shape) != place.shape or _DTYPES.get(place.dtype) != value.dtype:
            got = f"{value.dtype} {tuple(value.shape)}"
            raise ModelError(
                f"{name} does not fit the base: expected {place and (place.dtype, place.shape)}, got {got}"
            )


def _bytes(value: Tensor) -> bytes:
    return value.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _read(place: StoredTensor) -> bytes:
    with place.file.open("rb") as stream:
        stream.seek(place.start)
        return stream.read(place.end - place.start)
