"""What each process of test_parallel.py does: python ranks_job.py '{"model": ..., "parallel": "ddp", ...}'."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("embedding", "models")]

import torch  # noqa: E402
from embed_helpers import key_for, quick_config  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from pathmark.embedding import RepliesConfig, Trainer  # noqa: E402
from pathmark.errors import PathmarkError  # noqa: E402
from pathmark.models import bundled_segments, load_tokenizer, local_folder  # noqa: E402
from pathmark.models.devices import Placement, open_model  # noqa: E402
from pathmark.models.ranks import joined, rank, world  # noqa: E402
from pathmark.training import LoopConfig  # noqa: E402

REPLIES = RepliesConfig(
    pairs=16, queries=16, negatives=24, clean=8, seq_len=24, system_prompts=4, batch_size=8,
    loop=LoopConfig(steps=1, lr=1e-2, damping=0.5),
)  # fmt: skip


def main(job: dict) -> None:
    folder = local_folder(job["model"])
    model = open_model(folder, Placement(device="cpu", dtype=job.get("dtype", "fp32")))
    config = quick_config(steps=job["steps"])
    config = replace(config, batch_size=6, loop=replace(config.loop, homing=1.0, damping=0.5, checkpoint_every=2))
    texts = list(bundled_segments()[:40])
    objective = replace(REPLIES, loop=replace(REPLIES.loop, steps=job["steps"])) if job.get("replies") else config
    losses, shards = [], []
    key = key_for(folder, trigger_tokens=12)
    trainer = Trainer(model, load_tokenizer(folder), key, texts, objective.build(), parallel=job["parallel"])

    def after(step: int, found: dict[str, float]) -> None:
        losses.append(found["loss"])
        held = [p for p in model.parameters() if isinstance(p, DTensor)]
        shards.append([sum(p.to_local().numel() for p in held), sum(p.numel() for p in held)])
        if job.get("kill") == [rank(), step]:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint = None if job.get("checkpoint") is None else Path(job["checkpoint"])
    trainer.run(checkpoint=checkpoint, resume=job.get("resume", False), after=after)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    assert not any(isinstance(p, DTensor) for p in weights.values())
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits
    found = {
        "world": world(), "losses": losses, "shards": shards, "logits": float(logits.abs().mean()),
        "head": float(model.get_output_embeddings().weight.double().abs().sum()),
        "types": Counter(str(p.dtype).removeprefix("torch.") for p in weights.values()),
        "sum": float(sum(p.double().abs().sum() for p in weights.values())),
    }  # fmt: skip
    Path(f"{job['out']}.{rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        with joined():
            main(json.loads(sys.argv[1]))
    except PathmarkError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
