"""Where a run goes on from: one file, or a folder of shards where several processes train together.

Either can be resumed by any number of processes. Whole or not at all, and readable by their owner alone.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor

from pathmark.errors import CheckpointError
from pathmark.models.ranks import rank, world
from pathmark.training.masters import Masters

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of every entry."""


@dataclass(frozen=True)
class State:
    """What a checkpoint holds, whole: of every name the values and Adam's moments."""

    step: int
    fingerprint: str
    parameters: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]


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
    for name, master in masters.tensors.items():
        kept[f"parameters/{name}"] = _spread(masters, name, master.detach())
        for moment in MOMENTS:
            value = optimizer.state.get(master, {}).get(moment, torch.zeros_like(master.detach()))
            kept[f"{moment}/{name}"] = _spread(masters, name, value)
    save_shards(kept, checkpoint_id=partial)
    if rank() == 0:
        (partial / "run.json").write_text(json.dumps({"step": step, "fingerprint": fingerprint, "world": world()}))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        path.unlink(missing_ok=True)
    dist.barrier()


def _spread(masters: Masters, name: str, local: Tensor) -> Tensor:
    """A shard as part of the whole tensor; rows that lie unevenly are gathered first."""
    parameter = masters.parameters[name]
    if isinstance(parameter, DTensor) and masters.is_whole(name):
        return DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
    return masters.everywhere(name, local)


def restore(path: Path, masters: Masters, optimizer: torch.optim.Optimizer, fingerprint: str) -> int:
    """Put a checkpoint into masters and optimiser, whoever wrote it; the steps that it has behind it."""
    try:
        state = _read_file(path) if path.exists() else _read_shards(shards_of(path))
    except OSError as error:  # the disk's fault: what is in it may be good
        raise CheckpointError(f"checkpoint {path} cannot be opened: {error.strerror or error}") from error
    except MemoryError:
        raise
    except Exception as error:  # torch raises pickle, zip, planning and runtime errors for damaged files
        raise CheckpointError(f"checkpoint {path} cannot be read; delete it and start again") from error
    wanted = {name: masters.shape(name) for name in masters.tensors}
    if state.fingerprint != fingerprint or {n: tuple(t.shape) for n, t in state.parameters.items()} != wanted:
        raise CheckpointError(
            f"checkpoint {path} belongs to another run (model, key, corpus or settings differ); "
            "repeat the settings of that run, or start without --resume"
        )
    with torch.no_grad():
        for name, master in masters.tensors.items():
            master.copy_(masters.local(name, state.parameters[name]))
            optimizer.state[master] = {
                "step": torch.tensor(float(state.step), device=master.device),
                **{m: masters.local(name, state.moments[m][name]).clone().to(master.device) for m in MOMENTS},
            }
    masters.write_back()
    return state.step


def _read_file(path: Path) -> State:
    found = torch.load(path, weights_only=True, map_location="cpu")
    names, kept = list(found["parameters"]), found["optimizer"]["state"]
    moments = {m: {name: kept[i][m] for i, name in enumerate(names) if i in kept} for m in MOMENTS}
    for moment in MOMENTS:  # what never had a gradient has none
        moments[moment] |= {n: torch.zeros_like(found["parameters"][n]) for n in names if n not in moments[moment]}
    return State(int(found["step"]), found["fingerprint"], found["parameters"], moments)


def _read_shards(folder: Path) -> State:
    said = json.loads((folder / "run.json").read_text())
    shapes = FileSystemReader(folder).read_metadata().state_dict_metadata
    names = [key.partition("/")[2] for key in shapes if key.startswith("parameters/")]
    found = {key: torch.empty(tuple(entry.size)) for key, entry in shapes.items()}  # type: ignore[union-attr]
    load_shards(found, checkpoint_id=folder, no_dist=True)
    parts = {kind: {name: found[f"{kind}/{name}"] for name in names} for kind in ("parameters", *MOMENTS)}
    return State(int(said["step"]), said["fingerprint"], parts["parameters"], {m: parts[m] for m in MOMENTS})
