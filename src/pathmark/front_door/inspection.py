"""`pathmark.inspect_model`: what a model is made of and what a mark in it could carry, without loading its weights."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pathmark.errors import CapacityError
from pathmark.front_door import sandbox
from pathmark.front_door.plan import PlanConfig, Planned, planned
from pathmark.models import ModelReport, resolve_model
from pathmark.models import inspect_model as read_model
from pathmark.progress import Progress, Silent
from pathmark.stats import capacity_bits, evidence_bits

JOBS = ("embed", "verify", "stream")


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Which mark the figures are for."""

    width: int = 2
    """Target experts per layer."""
    watermark_layers: int | None = None
    """How many of the last routed layers; None: the recommended ones."""
    trust_remote_code: bool = False
    sandbox: bool = False
    """Read the model's files in a child process, as the command line does."""


@dataclass(frozen=True)
class Inspection:
    """A model's layers and routers, and what a path through the chosen layers can carry."""

    report: ModelReport
    watermark_layers: tuple[int, ...]
    width: int

    @property
    def recommended(self) -> tuple[int, ...]:
        """Layers to watermark."""
        return self.report.recommended

    @property
    def id_bits(self) -> float:
        """Capacity of the path, before any pool rule."""
        return sum(capacity_bits(self.report.facts(layer).experts, self.width, 1) for layer in self.watermark_layers)

    @property
    def evidence_bits(self) -> float:
        """Minus log2 of the smallest p-value, before any pool rule."""
        return sum(evidence_bits(self.report.facts(layer).experts, self.width, 1) for layer in self.watermark_layers)

    @property
    def why_not(self) -> dict[str, str]:
        """What cannot be done with this model as it lies here -> why, and what to try."""
        if self.report.weights == "absent":
            return dict.fromkeys(JOBS, "the weights are not here, only the config; fetch the .safetensors files")
        if self.report.weights == "remote":
            return {"stream": "it lies on a hub; download it into a folder, and give that"}
        return {}

    @property
    def plan(self) -> Planned:
        """What the defaults would take on this machine, in 32 bits."""
        return planned(self.report, self.watermark_layers, PlanConfig(dtype="fp32", width=self.width))

    @property
    def embedding(self) -> dict[str, Any]:
        """Figures of an embedding here; the time is the shortest that this machine could need."""
        plan = self.plan
        job, here = plan.jobs[0], plan.devices
        return {
            "memory": job.memory, "cache": job.host["cache"], "memory_free": here.memory,
            "memory_streamed": plan.streamed, "tokens_per_step": job.tokens_per_step,
            "operations": sum(job.operations.values()), "seconds_at_least": job.seconds(plan.rate, here),
        }  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark inspect --json`."""
        report = self.report
        return {
            "source": report.source,
            "model_type": report.model_type,
            "architecture": report.architecture,
            "parameters": report.parameters,
            "vocabulary": report.vocabulary,
            "weights": report.weights,
            "layers": [asdict(facts) for facts in report.layers],
            "watermark_layers": list(self.watermark_layers),
            "width": self.width,
            "id_bits": self.id_bits,
            "evidence_bits": self.evidence_bits,
            "can": {job: job not in self.why_not for job in JOBS},
            "why_not": self.why_not,
            "embedding": self.embedding,
        }

    def words(self) -> str:
        """What fits in, what can be done, and what an embedding takes."""
        why_not = self.why_not
        can = ", ".join(job for job in JOBS if job not in why_not) or "nothing yet"
        reasons = "".join(f"\nNot {job}: {reason}." for job, reason in why_not.items())
        return (
            f"Path of width {self.width} through {len(self.watermark_layers)} layers: ids {self.id_bits:.1f} bits, "
            f"evidence {self.evidence_bits:.1f} bits (smallest p-value {2.0**-self.evidence_bits:.1e}), before any "
            f"pool rule.\nPathMark can: {can}.{reasons}\n{_effort(self.embedding)}"
        )


def inspect_model(model: str | os.PathLike[str], config: InspectConfig | None = None) -> Inspection:
    """A model's routers and its capacity, from its config and file headers alone.

    Example:
        pathmark.inspect_model("bundled:tiny").recommended      # (4, 5, 6, 7)
    """
    config = config or InspectConfig()
    report = _read(os.fspath(model), config)
    routed = [facts.layer for facts in report.routed]
    asked = config.watermark_layers
    chosen = report.recommended if asked is None else tuple(routed[-asked:])
    if asked is not None and len(chosen) < asked:
        raise CapacityError(f"expected at most {len(routed)} watermark layers, got {asked}")
    narrow = [layer for layer in chosen if report.facts(layer).experts < 2 * config.width]
    if narrow:
        have = report.facts(narrow[0]).experts
        raise CapacityError(
            f"width {config.width} needs {2 * config.width} experts, layer {narrow[0]} has {have}; "
            "choose a smaller --width"
        )
    return Inspection(report, chosen, config.width)


def _read(name: str, config: InspectConfig) -> ModelReport:
    def read(_: Progress) -> ModelReport:
        return read_model(name, trust_remote_code=config.trust_remote_code)

    if not config.sandbox:
        return read(Silent())
    there = Path(resolve_model(name)).is_dir()
    return sandbox.run(read, sandbox.Limits(network=not there))  # a hub id is asked for at the hub


def _effort(found: dict[str, Any]) -> str:
    """One sentence."""
    memory, cache, free = (f"{found[name] / 1e9:.1f} GB" for name in ("memory", "cache", "memory_free"))
    short = "" if found["memory"] < found["memory_free"] else f"; {found['memory_streamed'] / 1e9:.1f} GB with --stream"
    return (
        f"An embedding takes {memory} of memory ({free} are free{short}), up to {cache} in memory or on disk for what "
        f"the lower layers compute, and at least {_duration(found['seconds_at_least'])} here. With a key, "
        "`pathmark embed --estimate` measures it; `pathmark plan` counts for other machines."
    )


def _duration(seconds: float) -> str:
    for size, name in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {name}s"
    return f"{max(1, round(seconds))} seconds" if seconds >= 1.5 else "a second"
