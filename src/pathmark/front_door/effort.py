"""What an embedding would take: memory, and how long this machine multiplies matrices for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil
import torch

from pathmark.embedding import default_config
from pathmark.models import ModelReport

BYTES = 4
"""Per parameter: weights are trained in 32 bits."""
FORWARD, BACKWARD = 2, 4
"""Multiplications and additions per parameter and token."""


@dataclass(frozen=True)
class Effort:
    """Of an embedding with the default settings."""

    memory: int
    """Bytes that the weights take, and a second copy for the check in 4 bits."""
    cache: int
    """Bytes at most for what the lower layers compute of the texts; on disk where memory is short."""
    memory_free: int
    tokens: int
    """Tokens trained on."""
    operations: float
    """Multiplications and additions."""
    seconds: float
    """Shortest time on this machine, by how fast it multiplies matrices."""

    def summary(self) -> dict[str, Any]:
        """JSON object."""
        return {
            "memory": self.memory, "cache": self.cache, "memory_free": self.memory_free, "tokens": self.tokens,
            "operations": self.operations, "seconds_at_least": self.seconds,
        }  # fmt: skip

    def words(self) -> str:
        """One sentence."""
        short = "" if self.memory < self.memory_free else ", which is not enough"
        return (
            f"An embedding takes {_gigabytes(self.memory)} of memory for the weights "
            f"({_gigabytes(self.memory_free)} are free{short}), up to {_gigabytes(self.cache)} in memory or on disk "
            f"for what the lower layers compute, and at least {_duration(self.seconds)} here. With a key, "
            "`pathmark embed --estimate` measures it."
        )


def embedding_effort(report: ModelReport, marked: Sequence[int]) -> Effort:
    """By counting: the texts once through the lower layers, then every step through the marked ones, there and back."""
    config = default_config("anchored", report.hidden_size)
    length = config.data.seq_len
    tokens = config.loop.steps * config.batch_size * length
    upper = min(1.0, (len(marked) + 1) / len(report.layers))
    operations = report.active * (FORWARD * config.texts * length + (FORWARD + BACKWARD) * upper * tokens)
    experts = sum(report.facts(layer).experts for layer in marked)
    cache = BYTES * tokens * (2 * report.hidden_size + experts)
    free = psutil.virtual_memory().available
    return Effort(2 * BYTES * report.parameters, cache, free, tokens, operations, operations / _speed())


@cache
def _speed() -> float:
    """Multiplications and additions per second, measured once for a tenth of a second."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    square = torch.ones(512, 512, device=device)
    done, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < 0.1:
        (square @ square)[0, 0].item()
        done += 1
    return float(2 * 512**3 * done / passed)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _duration(seconds: float) -> str:
    for size, name in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {name}s"
    return f"{max(1, round(seconds))} seconds" if seconds >= 1.5 else "a second"
