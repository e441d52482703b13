"""Where a run goes on from: one file, or a folder with a file per process where several train together.

Either can be resumed by any number of processes, each of which writes and reads the rows that it holds. Whole or not at
all, and readable by their owner alone.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pathmark.errors import CheckpointError
from pathmark.models.ranks import rank, world
from pathmark.training.masters import Masters, Rows

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of every entry."""
PARAMETERS = "parameters"


@dataclass(frozen=True)
class Piece:
    """Neighbouring rows of a tensor, on the disk until they are asked for."""

    first: int
    shape: tuple[int, ...]
    stored: Any
    """Gives the tensor, or the asked rows of it, by its square brackets."""


@dataclass(frozen=True)
class State:
    """What a checkpoint holds of every name: the values and Adam's moments."""

    step: int
    fingerprint: str
    pieces: dict[str, dict[str, list[Piece]]]
    """`parameters` or a moment -> name -> all rows, in order."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the values, by name."""
        found = {}
        for name, pieces in self.pieces[PARAMETERS].items():
            shape = pieces[0].shape
            found[name] = (sum(piece.shape[0] for piece in pieces), *shape[1:]) if shape else shape
        return found

    def rows(self, kind: str, name: str, rows: Rows) -> Tensor:
        """Some rows of the values or of a moment; of all pieces only what is needed is read."""
        pieces = self.pieces[kind][name]
        if not isinstance(rows, slice):
            parts = [piece.stored[...] for piece in pieces]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        parts = []
        for piece in pieces:
            begin, end = max(rows.start, piece.first), min(rows.stop, piece.first + piece.shape[0])
            parts.append(piece.stored[begin - piece.first : max(begin, end) - piece.first])
        return torch.cat(parts)


def shards_of(path: Path) -> Path:
    """The folder that stands for this file where several processes write."""
    return path.with_suffix(".shards")


def resumable(path: Path) -> bool:
    """Whether there is something to resume."""
    return path.exists() or shards_of(path).is_dir()


def save(path: Path, masters: Masters, optimizer: torch.optim.Optimizer, step: int, fingerprint: str) -> None:
    """Leave a checkpoint in place of an earlier one."""
    if world() > 1:
        _save_shards(path, masters, optimizer, step, fingerprint)
        return
    state = {
        "fingerprint": fingerprint,
        "step": step,
        "parameters": {name: master.detach() for name, master in masters.tensors.items()},
        "optimizer": optimizer.state_dict(),
    }
    partial = path.with_suffix(".part")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
    shutil.rmtree(shards_of(path), ignore_errors=True)


def _save_shards(path: Path, masters: Masters, optimizer: torch.optim.Optimizer, step: int, fingerprint: str) -> None:
    """Every process writes what it holds; the first one puts the folder in its place."""
    folder, partial = shards_of(path), path.with_suffix(".shards.part")
    if rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
    dist.barrier()
    kept: dict[str, Tensor] = {}
    first: dict[str, str] = {}
    for name, master in masters.tensors.items():
        rows = masters.rows(name)
        if not isinstance(rows, slice) and rank() > 0:
            continue  # the first process has it as well
        first[name] = str(rows.start if isinstance(rows, slice) else 0)
        kept[f"{PARAMETERS}/{name}"] = master.detach().contiguous()
        for moment in MOMENTS:
            value = optimizer.state.get(master, {}).get(moment, torch.zeros_like(master.detach()))
            kept[f"{moment}/{name}"] = value.contiguous()
    if kept:  # with DDP the first process has it all, and safetensors cannot read a file of nothing
        file = partial / f"{rank()}.safetensors"
        save_file(kept, file, metadata=first)
        with file.open("rb+") as stream:
            os.fsync(stream.fileno())
    dist.barrier()
    if rank() == 0:
        run = {"step": step, "fingerprint": fingerprint, "files": [file.name for file in partial.iterdir()]}
        (partial / "run.json").write_text(json.dumps(run))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        path.unlink(missing_ok=True)
    dist.barrier()


def restore(path: Path, masters: Masters, optimizer: torch.optim.Optimizer, fingerprint: str) -> int:
    """Put a checkpoint into masters and optimiser, whoever wrote it; the steps that it has behind it."""
    try:
        state = _read_file(path) if path.exists() else _read_shards(shards_of(path))
    except OSError as error:  # the disk's fault: what is in it may be good
        raise CheckpointError(f"checkpoint {path} cannot be opened: {error.strerror or error}") from error
    except MemoryError:
        raise
    except Exception as error:  # torch raises pickle, zip and runtime errors for damaged files, safetensors its own
        raise CheckpointError(f"checkpoint {path} cannot be read; delete it and start again") from error
    if state.fingerprint != fingerprint or state.shapes() != {name: masters.shape(name) for name in masters.tensors}:
        raise CheckpointError(
            f"checkpoint {path} belongs to another run (model, key, corpus or settings differ); "
            "repeat the settings of that run, or start without --resume"
        )
    with torch.no_grad():
        for name, master in masters.tensors.items():
            rows = masters.rows(name)
            master.copy_(state.rows(PARAMETERS, name, rows))
            optimizer.state[master] = {
                "step": torch.tensor(float(state.step), device=master.device),
                **{m: state.rows(m, name, rows).clone().to(master.device) for m in MOMENTS},
            }
    masters.write_back()
    return state.step


def _read_file(path: Path) -> State:
    # several processes on a machine read it together, each its rows
    found = torch.load(path, weights_only=True, map_location="cpu", mmap=world() > 1)
    names, kept = found[PARAMETERS].keys(), found["optimizer"]["state"]
    pieces = {PARAMETERS: {name: [_whole(tensor)] for name, tensor in found[PARAMETERS].items()}}
    for moment in MOMENTS:
        held = {name: kept[i][moment] for i, name in enumerate(names) if i in kept}
        for name in names - held.keys():  # what never had a gradient has none
            held[name] = torch.zeros_like(found[PARAMETERS][name])
        pieces[moment] = {name: [_whole(tensor)] for name, tensor in held.items()}
    return State(int(found["step"]), found["fingerprint"], pieces)


def _whole(tensor: Tensor) -> Piece:
    return Piece(0, tuple(tensor.shape), tensor)


def _read_shards(folder: Path) -> State:
    said = json.loads((folder / "run.json").read_text())
    pieces: dict[str, dict[str, list[Piece]]] = {kind: {} for kind in (PARAMETERS, *MOMENTS)}
    for file in said["files"]:
        shard: Any = safe_open(folder / file, "pt")
        for name, first in shard.metadata().items():
            for kind, by_name in pieces.items():
                stored = shard.get_slice(f"{kind}/{name}")
                by_name.setdefault(name, []).append(Piece(int(first), tuple(stored.get_shape()), stored))
    for by_name in pieces.values():
        for found in by_name.values():
            found.sort(key=lambda piece: (piece.first, piece.shape))
    return State(int(said["step"]), said["fingerprint"], pieces)
