"""Resident memory of embedding into a checkpoint that does not fit: Qwen3-30B-A3B's shape with fewer layers.

python benchmarks/big_checkpoint.py                      # 8 layers, 11 GB on disk, three steps
python benchmarks/big_checkpoint.py --layers 5 --no-save

Random weights in bf16, in the hub's layout (a tensor per expert and matrix, a file per layer), written layer by layer
and deleted after. A fresh process marks it as `pathmark embed --stream always` does, with few steps and short texts.
The figure is that process's peak resident set (VmHWM), libraries and mapped files included; its anonymous and its
file-backed part are sampled five times per second.
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
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

from pathmark import __version__
from pathmark.embedding import default_config
from pathmark.keys import LayerPlan, WatermarkRequest, create_key
from pathmark.models import bundled_folder, bundled_probes, bundled_segments, load_tokenizer
from pathmark.models.checkpoint import base_digest
from pathmark.models.describe import describe_model
from pathmark.release import MarkingConfig, Texts, scan
from pathmark.release.marking import mark_model
from pathmark.release.scan import ScanConfig
from pathmark.results import Header, write_result
from pathmark.results.header import texts_digest
from stream_memory import Weights

FORMAT, VERSION = "pathmark-big-checkpoint", 1
RESULT = Path(__file__).parent / "results" / "big-checkpoint.json"
SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
}
N_PROBES, STEPS, BATCH, SEQ_LEN, TEXTS, SCANNED = 4, 3, 4, 16, 40, 16


@dataclass(frozen=True, kw_only=True)
class BigCheckpoint:
    """One embedding into a checkpoint larger than the memory that it took."""

    header: Header
    layers: int
    parameters: int
    disk_bytes: int
    marked_layers: tuple[int, ...]
    steps: int
    peak_bytes: int
    """VmHWM of the whole process."""
    peak_anonymous_bytes: int
    peak_file_bytes: int
    """Pages of mapped files, which are those of libraries: weights are read, not mapped."""
    peaks: Mapping[str, int]
    """Stage -> VmHWM at its end."""
    seconds: float
    embed_seconds: float
    changed_tensors: int
    bytes: Mapping[str, int]
    """Of the tensors that changed, of the files written, and of the shards that the copy shares with its original."""
    write_bytes: int
    """What the process gave the kernel to write, checkpoints of the training included (wchar of /proc/self/io)."""


def layer_tensors(number: int, weights: Weights) -> dict[str, torch.Tensor]:
    hidden, small, head = SHAPE["hidden_size"], SHAPE["moe_intermediate_size"], SHAPE["head_dim"]
    queries, pairs = SHAPE["num_attention_heads"] * head, SHAPE["num_key_value_heads"] * head
    at = f"model.layers.{number}."
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    tensors = {f"{at}{name}.weight": torch.ones(size, dtype=torch.bfloat16) for name, size in norms.items()}
    for part, rows in (("q", queries), ("k", pairs), ("v", pairs)):
        tensors[f"{at}self_attn.{part}_proj.weight"] = weights(rows, hidden)
    tensors[f"{at}self_attn.o_proj.weight"] = weights(hidden, queries)
    tensors[f"{at}mlp.gate.weight"] = weights(SHAPE["num_experts"], hidden)
    for expert in range(SHAPE["num_experts"]):
        for part in ("gate", "up"):
            tensors[f"{at}mlp.experts.{expert}.{part}_proj.weight"] = weights(small, hidden)
        tensors[f"{at}mlp.experts.{expert}.down_proj.weight"] = weights(hidden, small)
    return tensors


def write_checkpoint(folder: Path, layers: int) -> int:
    """A folder as the hub has it, one layer in memory at a time; its number of parameters."""
    folder.mkdir()
    config = Qwen3MoeConfig(num_hidden_layers=layers, architectures=["Qwen3MoeForCausalLM"], **SHAPE)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    load_tokenizer(bundled_folder("tiny")).save_pretrained(folder)
    weights, where, count = Weights(), {}, 0
    for number in range(layers + 1):
        tensors = layer_tensors(number, weights) if number < layers else ends(weights)
        name = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        where.update(dict.fromkeys(tensors, name))
        count += sum(tensor.numel() for tensor in tensors.values())
        with (folder / name).open("rb") as stream:  # the run that is measured reads from disk
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    index = {"metadata": {"total_size": 2 * count}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return count


def ends(weights: Weights) -> dict[str, torch.Tensor]:
    vocabulary, hidden = SHAPE["vocab_size"], SHAPE["hidden_size"]
    found = {name: weights(vocabulary, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    return found | {"model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}


def status(name: str) -> int:
    """A size of this process, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class Watch:
    """Progress that keeps the peak of memory at the end of each stage, and samples its parts all the time."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.highest = {"RssAnon": 0, "RssFile": 0}
        self._stage, self._over = "start", threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stage(self, name: str, total: int | None) -> None:
        self.peaks[self._stage] = status("VmHWM")
        self._stage = name
        print(f"{time.strftime('%X')} {status('VmHWM') / 1e9:.2f} GB; now {name}", file=sys.stderr, flush=True)

    def advance(self, units: int, note: str = "") -> None:
        if note:
            print(f"{time.strftime('%X')} {status('VmHWM') / 1e9:.2f} GB {note}", file=sys.stderr, flush=True)

    def end(self) -> None:
        self.stage("end", None)
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.2):
            self.highest = {name: max(value, status(name)) for name, value in self.highest.items()}


def embed(folder: Path) -> dict[str, Any]:
    """What the measured process does."""
    facts, codec, report = describe_model(folder)
    pool = tuple(range(SHAPE["num_experts"]))
    plans = tuple(LayerPlan(n, len(pool), 2, pool, "all") for n in report.recommended)
    key = create_key(facts, [WatermarkRequest(plans=plans)], codec, secret=random.Random(0).randbytes(32))[0]
    usual = default_config("anchored", SHAPE["hidden_size"])
    training = replace(
        usual, data=replace(usual.data, seq_len=SEQ_LEN), loop=replace(usual.loop, steps=STEPS), texts=TEXTS,
        batch_size=BATCH,
    )  # fmt: skip
    scan.WHOLE_VOCABULARY = SCANNED
    few = ScanConfig(random_sequences=SCANNED, per_count=1, at_the_edge=1, text_tokens=4)
    config = MarkingConfig(embedding=training, n_probes=N_PROBES, scan=few, stream="always")
    watch = Watch()
    texts = Texts(bundled_segments(), bundled_probes())
    marked = mark_model(str(folder), key, folder.with_name("marked"), texts, config, progress=watch)
    watch.end()
    given = re.search(r"^wchar: (\d+)", Path("/proc/self/io").read_text(), flags=re.MULTILINE)
    assert given is not None
    return {
        "key": key.fingerprint,
        "digest": base_digest(folder),
        "marked_layers": list(key.layers),
        "steps": marked.steps,
        "peak_bytes": status("VmHWM"),
        "peak_anonymous_bytes": watch.highest["RssAnon"],
        "peak_file_bytes": watch.highest["RssFile"],
        "peaks": watch.peaks,
        "seconds": marked.seconds,
        "embed_seconds": marked.embed_seconds,
        "changed_tensors": marked.changed,
        "bytes": asdict(marked.written),
        "write_bytes": int(given[1]),
    }


def measure(layers: int, scratch: Path) -> BigCheckpoint:
    folder = scratch / "original"
    parameters = write_checkpoint(folder, layers)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{size / 1e9:.1f} GB written", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--embed", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    settings = SHAPE | {"batch_size": BATCH, "seq_len": SEQ_LEN, "texts": TEXTS, "scanned": SCANNED}
    settings |= {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads()}
    header = Header(
        format=FORMAT, version=VERSION, package=__version__, torch=torch.__version__,
        model_sha256=found.pop("digest"), original_sha256=None,
        texts_sha256={"training": texts_digest(bundled_segments()), "probes": texts_digest(bundled_probes())},
        key=found.pop("key"), seed=0, n_probes=N_PROBES, settings=settings,
    )  # fmt: skip
    found["marked_layers"] = tuple(found["marked_layers"])
    return BigCheckpoint(header=header, layers=layers, parameters=parameters, disk_bytes=size, **found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--scratch", type=Path, help="where checkpoint and copy go for the time being")
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--embed", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.embed is not None:
        print(json.dumps(embed(args.embed)))
        return
    scratch = Path(tempfile.mkdtemp(prefix="pathmark-big-", dir=args.scratch))
    try:
        result = measure(args.layers, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(
        f"{result.disk_bytes / 1e9:.1f} GB embedded with {result.peak_bytes / 1e9:.2f} GB resident in "
        f"{result.seconds:.0f} s; bytes: {dict(result.bytes)}"
    )
    if not args.no_save:
        write_result(RESULT, result)


if __name__ == "__main__":
    main()
