"""What each process of test_parallel.py does with the front door: fine-tuning, perplexity, routes, an embedding."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch

import pathmark
from pathmark.attacks.finetuning import FineTune, fine_tune
from pathmark.attacks.kit import Kit
from pathmark.models import bundled_probes, bundled_segments, load_model, load_tokenizer, perplexity
from pathmark.models.ranks import joined
from pathmark.release import scan
from pathmark.release.scan import ScanConfig
from pathmark.verification import ExamineConfig, encode_probes, record_routes


def measured(job: dict) -> dict:
    model, tokenizer = load_model(job["model"]), load_tokenizer(job["model"])
    probes = encode_probes(tokenizer, bundled_probes(), n_probes=7, length=24)
    routes = record_routes(model, probes, [2, 3])
    found = {"ppl": perplexity(model, probes).value, "routes": float(routes.probs[3].sum(dtype="float64"))}
    found["chosen"] = int(routes.decisions[2].sum())
    kit = Kit(tokenizer=tokenizer, texts=list(bundled_segments()[:30]), parallel=job["parallel"])
    tuned = fine_tune(model, FineTune(samples=13, epochs=2, batch_size=5, length=24, lr=1e-2), kit)
    return found | {"tuned": perplexity(tuned, probes).value}


def embedded(job: dict) -> dict:
    scan.WHOLE_VOCABULARY = 20
    few = ScanConfig(random_sequences=4, per_count=2, at_the_edge=1, text_tokens=4)
    plan = pathmark.EmbedPlan(steps=3, n_texts=20, n_held_out=6, batch_size=4, seq_len=16, scan=few)
    key = Path(job["key"])
    copy = pathmark.embed(job["model"], key, job["copy"], replace(plan, parallel=job["parallel"]), passphrase="x")
    return {"ppl": copy.marked.check.clean_ppl[1], "reported": copy.report is not None}


def verified(job: dict) -> dict:
    examine = ExamineConfig(n_probes=7, tokens=24)
    config = pathmark.VerifyConfig(examine=examine, texts=list(bundled_probes()))
    told = Told()
    found = pathmark.verify(job["model"], Path(job["verify"]), config, passphrase="x", progress=told)
    assert (found.verdict.n_probes, found.examined.access) == (7, "weights")
    return {"p": found.p.log10, "tokens": found.verdict.n_tokens, "rows": told.done}


class Told:
    """Counts the rows that this process runs."""

    done = 0

    def stage(self, name: str, total: int | None) -> None:
        pass

    def advance(self, units: int, note: str = "") -> None:
        self.done += units


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    out = Path(f"{asked['out']}.{os.environ['RANK']}.json")
    if "verify" in asked:  # joins the others by itself
        out.write_text(json.dumps(verified(asked)))
    else:
        with joined():
            out.write_text(json.dumps((embedded if "copy" in asked else measured)(asked)))
