"""`pathmark.plan`: what embedding, verifying and attacking a model take, from its config alone."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from pathmark.attacks.finetuning import FineTune
from pathmark.embedding import default_config
from pathmark.errors import ModelError
from pathmark.evaluate.suites import SUITES
from pathmark.models import ModelReport
from pathmark.models import inspect_model as read_model
from pathmark.models.inspection import inspect_known, presets
from pathmark.release.plan import (
    WIDE,
    Devices,
    Job,
    plan_attacks,
    plan_embedding,
    plan_verification,
    streamed_memory,
)

SAFE = 0.8
"""Of a device's memory; plans were up to 16 % too low where they were compared."""


def _counted(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """On what, how fast, and how much of it."""

    devices: str | None = None
    """Such as `8x80GB`. None: this machine."""
    tflops: float | None = None
    """10^12 operations per second that one device really does. None: as fast as this machine multiplies matrices."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of weights that are not trained."""
    steps: int | None = None
    """Of the embedding. None: the default."""
    batch_size: int = 16
    seq_len: int = 128
    width: int = 2
    """Target experts per layer."""
    recompute: bool = False
    suite: Literal["core", "paper", "full"] = "full"
    """Attacks of the robustness run."""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Planned:
    """What each job takes on the devices."""

    source: str
    parameters: int
    active: int
    marked: tuple[int, ...]
    devices: Devices
    rate: float
    """Operations per second and device."""
    measured: bool
    """The rate was measured on this machine, not stated."""
    jobs: tuple[Job, ...]
    streamed: int
    """Bytes in memory of an embedding that leaves on disk what does not change (`--stream always`)."""

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark plan --json`."""
        return {
            "source": self.source,
            "parameters": self.parameters,
            "active": self.active,
            "watermark_layers": list(self.marked),
            "devices": self.devices.count,
            "device_bytes": self.devices.memory,
            "rate": self.rate,
            "rate_measured": self.measured,
            "streamed_bytes": self.streamed,
            "jobs": {
                job.name: job.summary()
                | {
                    "device_bytes": job.per_device(self.devices),
                    "fits": self._fits(job),
                    "hours": job.seconds(self.rate, self.devices) / 3600,
                    "spread": job.spread(self.devices),
                    "processes": job.workers(self.devices),
                }
                for job in self.jobs
            },
        }

    def _fits(self, job: Job) -> bool:
        return self.devices.memory is None or job.per_device(self.devices) <= SAFE * self.devices.memory

    def words(self) -> str:
        """One paragraph for people."""
        spread = [job.name for job in self.jobs if job.spread(self.devices)]
        lies = (
            f" One device cannot hold what is needed for {', '.join(spread)}: the model lies over all of them in one "
            "process, and more devices are no faster."
            if spread else ""
        )  # fmt: skip
        large = [job.name for job in self.jobs if not self._fits(job)]
        advice = (
            f" Too much for these devices: {', '.join(large)}. Try more or larger ones, or streaming." if large else ""
        )
        how = "as fast as this machine multiplies matrices" if self.measured else "as stated"
        return (
            f"{self.source} has {_counted(self.parameters)} parameters, of which a token meets {_counted(self.active)}."
            f" Arithmetic is at {self.rate / 1e12:.3g} TFLOP/s per device, {how}; real runs take longer by what does "
            f"not multiply, such as reading the weights.{lies}{advice} With `--stream always`, which leaves on disk "
            f"what does not change, one machine embeds in {self.streamed / 1e9:.1f} GB of memory; `verify` has it too. "
            "Formulae: docs/planning.md."
        )


def plan(model: str | os.PathLike[str], config: PlanConfig | None = None) -> Planned:
    """Memory per device, tokens per step, hours and disk of embed, verify and robustness; no weights are read.

    Example:
        pathmark.plan("Qwen3-30B-A3B", pathmark.PlanConfig(devices="8x80GB", tflops=150)).summary()["jobs"]["embed"]
    """
    config = config or PlanConfig()
    name = os.fspath(model)
    report = None if Path(name).exists() else inspect_known(name)
    try:
        report = report or read_model(name, trust_remote_code=config.trust_remote_code)
    except ModelError as error:
        if Path(name).exists():
            raise
        raise ModelError(f"{error}; known by name are {', '.join(presets())}") from error
    return planned(report, report.recommended, config)


def planned(report: ModelReport, marked: tuple[int, ...], config: PlanConfig) -> Planned:
    """The same for a model that was looked at."""
    devices = parse_devices(config.devices, 2 if config.dtype == "bf16" else WIDE)
    usual = default_config("anchored", report.hidden_size)
    training = usual.shaped(
        steps=config.steps or usual.loop.steps, batch_size=config.batch_size, seq_len=config.seq_len,
        recompute=config.recompute,
    )  # fmt: skip
    return Planned(
        source=report.source,
        parameters=report.sizes.total,
        active=report.sizes.active,
        marked=tuple(marked),
        devices=devices,
        rate=speed() if config.tflops is None else 1e12 * config.tflops,
        measured=config.tflops is None,
        jobs=(
            plan_embedding(report.sizes, marked, training, devices, width=config.width),
            plan_verification(report.sizes, devices),
            _robustness(report, devices, config),
        ),
        streamed=streamed_memory(report.sizes, marked, training, width=config.width),
    )


def _robustness(report: ModelReport, devices: Devices, config: PlanConfig) -> Job:
    """Tokens of fine-tuning per minute on the bundled model, times the minutes of the suite's attacks there."""
    cases, usual = SUITES[config.suite], FineTune()
    tokens, minutes = 0.0, 0.0
    for case in SUITES["full"]:
        tuning = [step.settings for step in case.steps if step.attack == "fine-tune"]
        minutes += case.minutes if tuning else 0.0
        for settings in tuning:
            tokens += settings.get("samples", usual.samples) * settings.get("epochs", usual.epochs) * usual.length
    tokens *= sum(case.minutes for case in cases) / minutes
    batch = usual.batch_size * usual.length
    return plan_attacks(report.sizes, devices, trained_tokens=tokens, cases=len(cases), batch=batch)


def parse_devices(text: str | None, weight_bytes: int) -> Devices:
    """`8x80GB`, `80GB`; None is this machine and its free memory."""
    if text is None:
        return Devices(memory=int(psutil.virtual_memory().available), weight_bytes=weight_bytes)
    found = re.fullmatch(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*GB", text.strip(), flags=re.IGNORECASE)
    if found is None or int(found[1] or 1) < 1 or float(found[2]) <= 0:
        raise ModelError(f"expected devices as COUNTxMEMORY such as 8x80GB, got {text!r}")
    return Devices(count=int(found[1] or 1), memory=int(float(found[2]) * 1e9), weight_bytes=weight_bytes)


@cache
def speed() -> float:
    """Multiplications and additions per second, measured once for a tenth of a second."""
    on_cuda = torch.cuda.is_available()
    size, batch = (4096, 8) if on_cuda else (512, 1)
    square = torch.ones(size, size, device="cuda" if on_cuda else "cpu", dtype=torch.bfloat16 if on_cuda else None)
    (square @ square)[0, 0].item()  # the first one also starts the library
    done, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < 0.1:
        for _ in range(batch):
            product = square @ square
        product[0, 0].item()  # a GPU is asked only now and then whether it is done
        done += batch
    return float(2 * size**3 * done / passed)
