"""Quantization libraries at work, in a process of their own: folder in, folder out.

They patch transformers when imported, change environment variables, and write to the terminal; in a process of
their own none of that outlives the job. `quantize_folder` is the caller's side; `python -m` of this module, with the
job's file, the other.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pathmark.errors import AttackError
from pathmark.models import load_model, load_tokenizer
from pathmark.progress import Progress

Library = Literal["gptqmodel", "auto_round"]
BATCH = 8
ENVIRONMENT = {"GPTQMODEL_CPU_WORKERS": "2", "HF_HUB_OFFLINE": "1"}
"""Two packing threads are enough for any model that a CPU can quantize; by default there is one per core."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that the other process needs to know."""

    library: Library
    source: str
    """Folder of the model and its tokenizer."""
    target: str
    bits: int
    group_size: int
    """0: one group per row."""
    dtype: str
    device: str
    rows: Sequence[Sequence[int]]
    """Calibration text as token rows."""
    iterations: int = 0
    """Steps per layer, where the library trains its rounding."""
    seed: int = 0


def require(library: Library) -> None:
    """Refuse at once, before anything is computed or written, where the library is missing."""
    if find_spec(library) is None:
        package = library.replace("_", "-")
        raise AttackError(f"this attack runs {package}, which is not installed; try `pip install pathmark[quantizers]`")


def quantize_folder(job: Job, folder: Path, progress: Progress) -> Path:
    """Run the job in another process with `folder` as its place to litter; advances once per layer.

    Gives the folder of the quantized model: the target, or the one inside it that auto-round makes.
    """
    file, log = folder / "job.json", folder / "log.txt"
    file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    command = [sys.executable, "-m", __name__, str(file)]
    with (
        log.open("w", encoding="utf-8") as stream,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stream, text=True, cwd=folder, env=os.environ | ENVIRONMENT
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for _ in process.stdout:
                progress.advance(1)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise AttackError(f"{job.library} gave up on this model: {_last_line(log)}")
    written = sorted(Path(job.target).rglob("config.json"))
    if len(written) != 1:
        raise AttackError(f"{job.library} wrote {len(written)} models, expected one: {_last_line(log)}")
    return written[0].parent


def _last_line(log: Path) -> str:
    """The error that a log ends with; progress bars may have been wiped over it."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (errors or lines or ["it said nothing"])[-1][:300]


def _gptqmodel(job: Job, layer_done: Callable[[], None]) -> None:
    import torch

    library: Any = import_module("gptqmodel")
    config = library.QuantizeConfig(bits=job.bits, group_size=job.group_size or -1, offload_to_disk=False)
    model = library.GPTQModel.load(job.source, config, device=job.device, dtype=getattr(torch, job.dtype))
    seen: set[int] = set()

    def layer_callback(layer_idx: int, submodule_finalized: bool) -> None:
        if layer_idx not in seen:
            seen.add(layer_idx)
            layer_done()

    model.layer_callback = layer_callback
    shortest = min(map(len, job.rows))
    rows = [{"input_ids": list(row), "attention_mask": [1] * len(row)} for row in job.rows]
    model.quantize(rows, batch_size=BATCH, calibration_data_min_length=min(shortest, 10))
    model.save(job.target)


def _auto_round(job: Job, layer_done: Callable[[], None]) -> None:
    import torch

    library: Any = import_module("auto_round")

    class Layers(logging.Handler):
        """The library tells of finished layers in its log only."""

        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("quantized "):
                layer_done()

    logging.getLogger("autoround").addHandler(Layers())
    rounding = library.AutoRound(
        load_model(job.source, dtype=getattr(torch, job.dtype)),  # from a folder it does not find Mixtral's experts
        tokenizer=load_tokenizer(job.source),
        bits=job.bits,
        group_size=job.group_size or -1,
        iters=job.iterations,
        nsamples=len(job.rows),
        seqlen=min(map(len, job.rows)),  # it drops what is shorter
        batch_size=BATCH,
        dataset=[torch.tensor([row]) for row in job.rows],
        seed=job.seed,
        device_map=job.device,
        enable_torch_compile=False,  # compiling takes minutes on a CPU, more than it saves
        low_cpu_mem_usage=False,
        amp=job.dtype != "float32",  # float32 would be written in half, and then replaced by what it was before
    )
    rounding.quantize_and_save(job.target, format="fake")
    _hub_names(Path(job.target))


def _hub_names(folder: Path) -> None:
    """Mixtral's experts under the names of its hub layout; auto-round writes half of each and nobody can load it."""
    from safetensors.torch import load_file, save_file

    def renamed(name: str) -> str:
        owner, kind, rest = name.partition(".block_sparse_moe.experts.")
        expert, _, part = rest.partition(".")
        matrix = {"gate_proj.weight": "w1.weight", "up_proj.weight": "w3.weight", "down_proj.weight": "w2.weight"}
        return f"{owner}{kind}{expert}.{matrix[part]}" if part in matrix else name

    for file in folder.rglob("*.safetensors"):
        tensors = load_file(file)
        if any(renamed(name) != name for name in tensors):
            save_file({renamed(name): tensor for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    for file in folder.rglob("*.safetensors.index.json"):
        index = json.loads(file.read_text(encoding="utf-8"))
        index["weight_map"] = {renamed(name): shard for name, shard in index["weight_map"].items()}
        file.write_text(json.dumps(index), encoding="utf-8")


def _main(file: str) -> None:
    said: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    job = Job(**said)
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # only our own lines reach the pipe

    def layer_done() -> None:
        report.write("layer\n")
        report.flush()

    {"gptqmodel": _gptqmodel, "auto_round": _auto_round}[job.library](job, layer_done)


if __name__ == "__main__":
    _main(sys.argv[1])
