"""Several processes at one job, as `torchrun` starts them; in a single process everything here is the identity."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from pathmark.errors import RanksError

ARRIVAL, PATIENCE = timedelta(minutes=10), timedelta(days=1)
"""How long a process waits for the others to come, and then for what they do: one may be writing and hashing hundreds
of gigabytes. That one has ended is told without it, by its closed connections or by torchrun, which ends the rest."""
GRACE = 0.5
"""Seconds in which torch's threads let go of the tensors of what failed. They need Python's lock for it, which torch
holds while it waits for these threads to end."""
T = TypeVar("T")


def world() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def announced() -> int:
    """How many processes torchrun says that it started, joined or not."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def require_alone(job: str) -> None:
    """Refuses what each of several processes would do anew: they would write the same files."""
    if announced() > 1:
        raise RanksError(f"{job} is for one process, got {announced()} from torchrun; start it without torchrun")


def local_rank() -> int:
    """The number of this one among those on the same machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def rank() -> int:
    """The number of this one."""
    return dist.get_rank() if world() > 1 else 0


def is_first() -> bool:
    """Whether this process writes and speaks for all that torchrun started."""
    return int(os.environ.get("RANK", "0")) == 0


def shares_rows(model: nn.Module) -> bool:
    """Whether several processes each have the whole model, so that each can run some of the rows."""
    return world() > 1 and not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@contextmanager
def joined(device: torch.device | None = None) -> Iterator[int]:
    """Inside the block the processes that torchrun started know each other; yields how many they are.

    gloo for what is on the CPU, nccl for what is on CUDA devices: figures and notes are on the CPU in either case.
    """
    wanted = announced()
    if wanted == 1 or dist.is_initialized():
        yield world()
        return
    on_gpu = device is not None and device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(local_rank())
    with others_may_end():
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=ARRIVAL)
    distributed_c10d._set_pg_timeout(PATIENCE)
    if world() != wanted:
        raise RanksError(f"torchrun announced {wanted} processes, {world()} are here; start all of them again")
    try:
        yield wanted
    finally:
        dist.destroy_process_group()


@contextmanager
def others_may_end() -> Iterator[None]:
    """Says in one line that another process ended, where a library speaks of sockets."""
    try:
        yield
    except RuntimeError as error:  # gloo and nccl have no type of their own
        if world() > 1 and any(word in str(error) for word in ("onnection", "gloo", "NCCL", "imed out")):
            time.sleep(GRACE)
            raise RanksError(
                f"another of the {world()} processes ended or no longer answers, so rank {rank()} stops; look at its "
                "output, then finish with --resume, with as many processes as you like"
            ) from error
        raise


def my_share(count: int) -> range:
    """Which of so many rows are this process's: a run of neighbours, as many as the others' or one more."""
    return range(rank() * count // world(), (rank() + 1) * count // world())


def averaged(values: dict[str, float]) -> dict[str, float]:
    """Figures, averaged over all processes."""
    if world() == 1:
        return values
    total = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(total)
    return dict(zip(values, (total / world()).tolist(), strict=True))


def summed(value: Tensor) -> Tensor:
    """A tensor, added up over all processes."""
    if world() > 1:
        dist.all_reduce(value)
    return value


def from_everybody(mine: T) -> list[T]:
    """What every process has, in the order of their ranks: figures and arrays of our own, no stranger's objects."""
    if world() == 1:
        return [mine]
    found: list[Any] = [None] * world()
    dist.all_gather_object(found, mine)
    return found


class _AllRows(torch.autograd.Function):
    """Rows of all processes, in order. Every process computes the same loss of them, so each needs the gradient of its
    own rows alone; times the world, because the parameters' gradients are averaged later."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, counts: Sequence[int]) -> Tensor:
        most = max(counts)
        padded = mine.new_zeros(most, *mine.shape[1:])
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded.contiguous())
        ctx.start, ctx.count = sum(counts[: rank()]), len(mine)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return world() * grad[ctx.start : ctx.start + ctx.count], None


def all_rows(mine: Tensor, count: int) -> Tensor:
    """The rows of all processes where each has its share of so many; gradients flow to one's own."""
    if world() == 1:
        return mine
    counts = [(r + 1) * count // world() - r * count // world() for r in range(world())]
    found: Tensor = _AllRows.apply(mine, counts)  # type: ignore[no-untyped-call]
    return found
