"""Changed weights, as a small file and as a whole model folder.

A marked model is its base plus the tensors that changed, in the hub's own layout. `write_delta` keeps only
those; `apply_delta` overwrites their bytes in copies of the shards that hold them, so everything else is the base's,
byte for byte, in the same shards. Shards in which nothing changed are not written again: both folders share them.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from pathmark.errors import ModelError
from pathmark.keys.digests import file_digest, same_bytes
from pathmark.keys.safefile import write_private
from pathmark.models.conversion import read_tensor
from pathmark.models.diskexperts import TRAINED, DiskExperts, disk_experts
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


@dataclass(frozen=True)
class Written:
    """What a marked copy took on disk, in bytes."""

    changed: int
    """Of the tensors that differ from the base's."""
    written: int
    """Of the files that were written: shards that hold such a tensor, and the small files beside them."""
    shared: int = 0
    """Of the shards that the copy has in common with its base."""

    def words(self) -> str:
        """For people."""
        shared = f", {self.shared / 1e6:,.0f} MB shared with the original" if self.shared else ""
        return f"{self.written / 1e6:,.1f} MB written, {self.changed / 1e6:,.1f} MB of them changed{shared}"


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder, from the headers alone."""
    return {name: entry for file in check_safetensors(folder) for name, entry in read_header(file).items()}


def base_digest(folder: Path) -> str:
    """sha256 over names and digests of the weight files: the base that a delta belongs to."""
    total = sha256()
    for file in check_safetensors(folder):
        total.update(f"{file.name}\0{file_digest(file)}\n".encode())
    return total.hexdigest()


def changed_tensors(model: PreTrainedModel, names: Iterable[str], base: Path) -> dict[str, Tensor]:
    """The named parameters in the hub's layout and the base's dtype, without those that did not change.

    One layer after the other, so that no second copy of the model is needed in memory or on disk.
    """
    stored = stored_tensors(base)
    state = model.state_dict()
    groups: dict[str, dict[str, Tensor]] = {}
    for name in names:
        if name not in state:
            raise ModelError(f"parameter {name} is not in the model's state")
        if not name.rpartition(".")[2].startswith(TRAINED):
            numbers = [i for i, part in enumerate(name.split(".")) if part.isdigit()]
            layer = ".".join(name.split(".")[: numbers[0] + 1]) if numbers else ""
            groups.setdefault(layer, {})[name] = state[name]
    changed: dict[str, Tensor] = {}
    for group in groups.values():
        changed |= _changed_in(model, group, stored, base)
    for module in model.modules():
        if (disk := disk_experts(module)) is not None:
            changed |= _changed_experts(disk, stored)
    return changed


def _changed_in(
    model: PreTrainedModel, state: dict[str, Tensor], stored: Mapping[str, StoredTensor], base: Path
) -> dict[str, Tensor]:
    """Those of these parameters, as they are stored, that are other than in the base."""
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


def _changed_experts(disk: DiskExperts, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Stored tensors of experts that were trained while the others stayed on disk."""
    places = {(tensor.file, tensor.start): name for name, tensor in stored.items()}
    changed: dict[str, Tensor] = {}
    for piece, value in disk.changed():
        source = piece.source
        narrow = value.to(_DTYPES[source.dtype]).contiguous()
        if _bytes(narrow) == _read(source):
            continue
        name = places.get((source.file, source.start))
        if name is not None and stored[name].end == source.end:
            changed[name] = narrow
            continue
        # a part of a tensor that is fused on disk too
        name = next(n for n, t in stored.items() if t.file == source.file and t.start <= source.start < t.end)
        if name not in changed:
            changed[name] = read_tensor(stored[name], _DTYPES[source.dtype])
        changed[name][(source.start - stored[name].start) // (source.end - source.start)] = narrow
    return changed


def write_delta(path: Path, tensors: Mapping[str, Tensor], digest: str) -> Written:
    """The changed tensors as one safetensors file that names its base; appears whole or not at all."""
    if path.exists():
        raise ModelError(f"{path} already exists; choose another name")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        save_file(dict(tensors), partial, metadata={"format": "pt", "pathmark": DELTA_FORMAT, "base": digest})
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return Written(sum(value.numel() * value.itemsize for value in tensors.values()), path.stat().st_size)


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
) -> Written:
    """A copy of the base with these tensors in place of its own; `out` appears whole or not at all.

    Shards without any of them are cloned or hard-linked where the file system can, and copied elsewhere. `private` are
    files, by name, that hold a secret: their owner alone may read them.
    """
    stored = stored_tensors(base)
    _check_fit(tensors, stored)
    if out.exists():
        raise ModelError(f"{out} already exists; choose another name, nothing is overwritten")
    out.parent.mkdir(parents=True, exist_ok=True)
    touched = {stored[name].file for name in tensors}
    with _staged(out) as stage:
        shared = [file for file in _unchanged(base, touched) if share_file(file, stage / file.name)]
        left = [file for file in _files(base) if file not in shared]
        need, free = sum(file.stat().st_size for file in left), shutil.disk_usage(out.parent).free
        if free < need:
            raise ModelError(f"{out.parent} has {free / 1e9:.1f} GB free, the copy needs {need / 1e9:.1f} GB")
        for file in left:
            target = stage / file.relative_to(base)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)  # contents alone: a read-only base must not give an unwritable copy
            here = {name: value for name, value in tensors.items() if stored[name].file == file}
            _overwrite(target, stored, here, progress)
        for name, data in (private or {}).items():
            write_private(stage / name, data, replace=True)
    sizes = sum(value.numel() * value.itemsize for value in tensors.values())
    return Written(changed=sizes, written=need, shared=sum(file.stat().st_size for file in shared))


def share_file(source: Path, target: Path) -> bool:
    """Make a file's bytes appear under another name without writing them; False where the file system cannot.

    A clone is tried first: it is a file of its own, whose later changes leave the source alone.
    """
    for make in (_clone, os.link):
        try:
            same_bytes(source.resolve(), target, make)
            return True
        except OSError:  # another file system, one without either, or somebody else's file
            target.unlink(missing_ok=True)
    return False


def _clone(source: Path, target: Path) -> None:
    """A copy on write, on file systems that have it."""
    ficlone = 0x40049409  # ioctl_ficlone(2); Python has no name for it
    with source.open("rb") as stream, target.open("xb") as copy:
        fcntl.ioctl(copy.fileno(), ficlone, stream.fileno())


def _files(base: Path) -> list[Path]:
    """Everything of a model folder that belongs into a copy."""
    found = []
    for root, folders, names in os.walk(base, followlinks=True):
        folders[:] = [name for name in folders if name not in (".git", ".cache")]
        found += [Path(root, n) for n in names if not any(fnmatch(n, kind) for kind in (*PICKLES, ".git", ".cache"))]
    return found


def _unchanged(base: Path, touched: set[Path]) -> list[Path]:
    return [file for file in check_safetensors(base) if file not in touched]


def _overwrite(
    file: Path,
    stored: Mapping[str, StoredTensor],
    tensors: Mapping[str, Tensor],
    progress: Callable[[str], None] | None,
) -> None:
    """Put tensors into their places in a file, and the file onto the disk."""
    with file.open("r+b") as stream:
        for name, value in tensors.items():
            stream.seek(stored[name].start)
            stream.write(_bytes(value))
            if progress is not None:
                progress(name)
        if file.suffix == ".safetensors":
            os.fsync(stream.fileno())


def write_model(model: PreTrainedModel, tokenizer: Any, out: Path) -> None:
    """A model of whatever shapes as a new folder, in the hub's layout; `out` appears whole or not at all.

    The tokenizer may be None, where there is none.
    """
    if out.exists():
        raise ModelError(f"{out} already exists; choose another name, nothing is overwritten")
    out.parent.mkdir(parents=True, exist_ok=True)
    with _staged(out) as stage:
        model.save_pretrained(stage)
        if tokenizer is not None:
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
