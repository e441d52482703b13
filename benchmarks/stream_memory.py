"""Resident memory of verifying a checkpoint that does not fit: Qwen1.5-MoE-A2.7B's shape, streamed.

python benchmarks/stream_memory.py                       # 6, 12 and 24 layers; the last has 28 GB on disk
python benchmarks/stream_memory.py --layers 2 --no-save
python benchmarks/stream_memory.py --render              # the table of docs/streaming.md, from the results

Random weights in bf16, in the hub's layout (a tensor per expert and matrix, a file per layer), written layer by
layer and deleted after. Each checkpoint is verified in a fresh process, from disk: its pages are dropped from the
system's cache first. The figure is that process's peak resident set (VmHWM), with libraries and everything;
`ru_maxrss` would not do, it survives from the parent. Where disk is short, fewer layers are written, and said.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen2MoeConfig

from pages import DOCS, write_section
from pathmark.keys import LayerPlan, WatermarkRequest, create_key
from pathmark.models import (
    bundled_folder,
    bundled_probes,
    inspect_model,
    load_tokenizer,
    should_stream,
    stream_model,
)
from pathmark.models.describe import describe_model
from pathmark.verification import ExamineConfig, attach_profiles, encode_probes, examine, judge

RESULT = Path(__file__).parent / "results" / "stream_memory.json"
DOC = DOCS / "speed.md"
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 8192,
    "rope_theta": 1_000_000.0,
}
LAYERS = 24
RESERVE_BYTES = 4_000_000_000


class Weights:
    """Normal numbers of standard deviation 0.02 in bf16, from one block: writing is bound by the disk."""

    def __init__(self, seed: int = 0) -> None:
        # a prime length: no two rows of a matrix are the same
        self.block = torch.randn(16_777_259, generator=torch.Generator().manual_seed(seed)).mul_(0.02).bfloat16()
        self.random = random.Random(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        flat, start = tensor.view(-1), self.random.randrange(len(self.block))
        done = 0
        while done < len(flat):
            size = min(len(flat) - done, len(self.block) - start)
            flat[done : done + size] = self.block[start : start + size]
            done, start = done + size, 0
        return tensor


def layer_tensors(number: int, weights: Weights) -> dict[str, torch.Tensor]:
    hidden, small = SHAPE["hidden_size"], SHAPE["moe_intermediate_size"]
    at = f"model.layers.{number}."
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {f"{at}input_layernorm.weight": ones, f"{at}post_attention_layernorm.weight": ones.clone()}
    for part in "qkvo":
        tensors[f"{at}self_attn.{part}_proj.weight"] = weights(hidden, hidden)
        if part != "o":
            tensors[f"{at}self_attn.{part}_proj.bias"] = weights(hidden)
    mlp = f"{at}mlp."
    tensors[f"{mlp}gate.weight"] = weights(SHAPE["num_experts"], hidden)
    tensors[f"{mlp}shared_expert_gate.weight"] = weights(1, hidden)
    owners = [(f"{mlp}shared_expert.", SHAPE["shared_expert_intermediate_size"])]
    owners += [(f"{mlp}experts.{e}.", small) for e in range(SHAPE["num_experts"])]
    for owner, width in owners:
        for part in ("gate", "up"):
            tensors[f"{owner}{part}_proj.weight"] = weights(width, hidden)
        tensors[f"{owner}down_proj.weight"] = weights(hidden, width)
    return tensors


def write_checkpoint(folder: Path, layers: int) -> None:
    """A folder as the hub has it, one layer in memory at a time."""
    folder.mkdir()
    config = Qwen2MoeConfig(num_hidden_layers=layers, architectures=["Qwen2MoeForCausalLM"], **SHAPE)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    load_tokenizer(bundled_folder("tiny")).save_pretrained(folder)
    weights, where = Weights(), {}
    vocabulary, hidden = SHAPE["vocab_size"], SHAPE["hidden_size"]

    def write(number: int, tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        where.update(dict.fromkeys(tensors, name))
        with (folder / name).open("rb") as stream:  # the run that is measured reads from disk
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    for number in range(layers):
        write(number, layer_tensors(number, weights))
    ends = {"model.embed_tokens.weight": weights(vocabulary, hidden), "lm_head.weight": weights(vocabulary, hidden)}
    write(layers, ends | {"model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)})
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def peak_resident() -> float:
    """Peak resident set of this process in GB (10^9 bytes)."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024 / 1e9


def verify(folder: Path, n_probes: int, length: int) -> dict[str, object]:
    """What the measured process does: profiles, then what `pathmark verify` does, decoys and alignment included."""
    facts, codec, report = describe_model(folder)
    pool = tuple(range(SHAPE["num_experts"]))
    plans = tuple(LayerPlan(n, len(pool), 2, pool, "all") for n in report.recommended)
    key = create_key(facts, [WatermarkRequest(plans=plans)], codec, secret=random.Random(0).randbytes(32))[0]
    probes = encode_probes(codec.tokenizer, bundled_probes(), n_probes=n_probes, length=length)
    chosen = should_stream(folder)
    before = peak_resident()
    key = attach_profiles(key, stream_model(folder), probes)  # as `embed` does, on the original
    profiled = peak_resident()
    started = time.monotonic()
    bar = Layers()
    examined = examine(str(folder), key, ExamineConfig(n_probes=n_probes, stream="always"), progress=bar)
    verdict = judge(key, examined.evidence)
    assert examined.access == "streamed weights"
    assert verdict.alignment is not None
    return {
        "peak_gb": peak_resident(),
        "before_gb": before,
        "profiled_gb": profiled,
        "seconds": time.monotonic() - started,
        "marked_layers": list(key.watermarks[0].layers),
        "p_value": verdict.p.value,
        "identity": verdict.alignment.identity,
        "probes": verdict.n_probes,
        "tokens": verdict.n_tokens,
        "streams_by_itself": chosen,
    }


class Layers:
    """Progress as lines on stderr."""

    def stage(self, name: str, total: int | None) -> None:
        print(name, file=sys.stderr)

    def advance(self, units: int, note: str = "") -> None:
        if note:
            print(note, file=sys.stderr)


def measure(layers: int, scratch: Path, args: argparse.Namespace) -> dict[str, object]:
    folder = scratch / f"qwen-{layers}"
    started = time.monotonic()
    try:
        write_checkpoint(folder, layers)
        written = time.monotonic() - started
        size = sum(file.stat().st_size for file in folder.iterdir())
        parameters = inspect_model(folder).parameters
        command = [sys.executable, __file__, "--verify", str(folder)]
        command += ["--probes", str(args.probes), "--length", str(args.length)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    return {"layers": layers, "parameters": parameters, "disk_gb": size / 1e9, "write_seconds": written} | measured


def affordable(wanted: list[int], scratch: Path) -> list[int]:
    """The sizes that fit on the disk; the largest that does in place of those that don't."""
    per_layer = 2 * sum(tensor.numel() for tensor in layer_tensors(0, Weights()).values())
    ends = 2 * 2 * SHAPE["vocab_size"] * SHAPE["hidden_size"]
    most = (shutil.disk_usage(scratch).free - RESERVE_BYTES - ends) // per_layer
    if most < max(wanted):
        print(f"the disk has room for {most} of {max(wanted)} layers: measured with that")
    return sorted({min(n, most) for n in wanted if min(n, most) > 0})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 12, LAYERS])
    parser.add_argument(
        "--probes", type=int, default=20, help="texts, each clean and triggered, and behind three decoys"
    )
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--scratch", type=Path, help="where the checkpoints go for the time being")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--render", action="store_true", help="measure nothing, rewrite the page's table")
    parser.add_argument("--verify", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.verify is not None:
        print(json.dumps(verify(args.verify, args.probes, args.length)))
        return
    if args.render:
        render()
        return
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="pathmark-stream-", dir=args.scratch) as scratch:
        for layers in affordable(args.layers, Path(scratch)):
            rows.append(measure(layers, Path(scratch), args))
            print(json.dumps(rows[-1]), flush=True)
            if not args.no_save:
                save(rows, args)
    print("layers  parameters  on disk    peak resident  of that before  seconds")
    for row in rows:
        print(
            f"{row['layers']:6d}  {row['parameters'] / 1e9:8.2f} B  {row['disk_gb']:5.1f} GB  "
            f"{row['peak_gb']:10.2f} GB  {row['before_gb']:11.2f} GB  {row['seconds']:7.0f}"
        )


def save(rows: list[dict[str, object]], args: argparse.Namespace) -> None:
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
    facts |= {"dtype": "float32", "probes": args.probes, "length": args.length, "cpus": os.cpu_count()}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(facts | {"runs": rows}, indent=1) + "\n")


def render() -> None:
    """Rewrite this script's part of docs/speed.md."""
    facts = json.loads(RESULT.read_text())
    lines = [
        f"Verified layer by layer: {facts['probes']} texts of {facts['length']} tokens, each with and without trigger, "
        f"computed in float32; torch {facts['torch']} with {facts['threads']} thread:",
        "",
        "| layers | parameters | on disk | peak resident | of that before the model is opened | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for row in facts["runs"]:
        lines.append(
            f"| {row['layers']} | {row['parameters'] / 1e9:.2f} B | {row['disk_gb']:.1f} GB | "
            f"{row['peak_gb']:.2f} GB | {row['before_gb']:.2f} GB | {row['seconds']:.0f} |"
        )
    write_section(DOC, "stream_memory.py", lines)


if __name__ == "__main__":
    main()
