"""Plans against what is measured, and against what is published about models."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import pathmark
from pathmark.embedding import default_config
from pathmark.errors import ModelError
from pathmark.front_door.plan import parse_devices
from pathmark.models.inspection import inspect_known, presets
from pathmark.release.plan import Devices, _activations, plan_embedding, streamed_memory

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "big-checkpoint.json"
PUBLISHED = {"Qwen1.5-MoE-A2.7B": 14.3, "Mixtral-8x7B": 46.7, "Phi-3.5-MoE": 41.9, "Qwen3-30B-A3B": 30.5}
"""Billions of parameters, from the models' cards."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_models_are_known_by_name(name):
    found = pathmark.plan(name, pathmark.PlanConfig(devices="8x80GB", tflops=100)).summary()
    assert found["parameters"] / 1e9 == pytest.approx(PUBLISHED[name], abs=0.06)
    assert set(found["jobs"]) == {"embed", "verify", "robustness"}
    embed = found["jobs"]["embed"]
    assert embed["fits"]
    assert embed["device_bytes"] < sum(embed["memory_parts"].values())
    whole = embed["memory_parts"]["weights"]
    assert embed["spread"] is (whole > 80e9)
    total, cache = sum(embed["operations"].values()), embed["operations"]["lower layers"]
    operations = total if embed["spread"] else cache + (total - cache) / 8
    assert embed["hours"] == pytest.approx(operations / 100e12 / 3600)
    if not embed["spread"]:  # every process opens the whole model
        assert embed["device_bytes"] > whole
        assert found["jobs"]["verify"]["device_bytes"] > whole
    assert inspect_known(f"somebody/{name}") is not None
    assert presets().keys() == PUBLISHED.keys()


def test_one_device_after_the_other_is_no_faster_and_several_processes_are():
    def hours(job, devices):
        found = pathmark.plan("Mixtral-8x7B", pathmark.PlanConfig(devices=devices, tflops=100)).summary()["jobs"][job]
        return found["hours"], found["processes"]

    alone, several, spread = (hours("verify", devices) for devices in ("1x200GB", "4x200GB", "4x80GB"))
    assert several == (pytest.approx(alone[0] / 4), 4)
    assert spread == (pytest.approx(alone[0]), 1)
    assert hours("robustness", "8x200GB")[1] == 1


def test_shared_experts_leave_activations_too():
    sizes = inspect_known("Qwen1.5-MoE-A2.7B").sizes
    layer = sizes.layers[0]
    without = replace(layer, rest=0)
    assert _activations(sizes, layer) - _activations(sizes, without) == 4 * sizes.hidden + 5 * 5633


def test_devices_are_read_and_nonsense_is_refused():
    assert parse_devices("8x80GB", 2) == Devices(count=8, memory=80_000_000_000, weight_bytes=2)
    assert parse_devices("24gb", 4).count == 1
    for wrong in ("8", "0x80GB", "8x", "8x0GB", "8x80TB"):
        with pytest.raises(ModelError, match="such as 8x80GB"):
            parse_devices(wrong, 2)


def test_what_saves_memory_saves_it_in_the_plan():
    sizes = inspect_known("Qwen3-30B-A3B").sizes
    usual = default_config("anchored", sizes.hidden)
    marked = inspect_known("Qwen3-30B-A3B").recommended

    def memory(weight_bytes=4, **changes):
        config = usual.shaped(**{"steps": 300, "batch_size": 16, "seq_len": 128} | changes)
        return plan_embedding(sizes, marked, config, Devices(weight_bytes=weight_bytes)).memory

    assert memory(weight_bytes=2) < memory()
    assert memory(recompute=True) < memory()
    assert memory(batch_size=8) < memory()
    assert streamed_memory(sizes, marked, usual) < 0.3 * memory(weight_bytes=2)


def test_the_plan_of_a_streamed_embedding_is_that_of_the_one_that_was_measured():
    found = json.loads(RESULT.read_text())
    shape, settings = inspect_known("Qwen3-30B-A3B").sizes, found["header"]["settings"]
    sizes = type(shape)(shape.hidden, shape.vocabulary, shape.layers[: found["layers"]], shape.ends)
    assert sizes.total == found["parameters"]
    config = default_config("anchored", sizes.hidden).shaped(
        steps=found["steps"], batch_size=settings["batch_size"], seq_len=settings["seq_len"]
    )
    assert streamed_memory(sizes, found["marked_layers"], config) == pytest.approx(found["peak_bytes"], rel=0.2)


MEASURE = """
import json, re, sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from pathmark.embedding import Trainer, default_config
from pathmark.keys import LayerPlan, WatermarkRequest, create_key
from pathmark.models import bundled_segments, find_routers, load_tokenizer
from pathmark.models.inspection import _report
from pathmark.models.loading import use_fast_experts
from pathmark.models.describe import config_digest, facts_from_report
from pathmark.models.tokenization import HFTextCodec
from pathmark.release.plan import LIBRARIES, Devices, plan_embedding

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

said, steps = json.loads(sys.argv[1]), 6
config = AutoConfig.for_model(**said)
report = _report("here", config, "absent", False)
tokenizer = load_tokenizer("bundled:tiny")
codec = HFTextCodec(tokenizer)
pool = tuple(range(report.facts(report.recommended[0]).experts))
plans = tuple(LayerPlan(n, len(pool), 2, pool, "all") for n in report.recommended)
key = create_key(
    facts_from_report(report, codec.digest, config_digest(config)),
    [WatermarkRequest(plans=plans)], codec, secret=bytes(32),
)[0]
before = peak()
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
use_fast_experts(model)
usual = default_config("anchored", report.hidden_size).shaped(steps=steps, batch_size=8, seq_len=64)
usual = type(usual)(**vars(usual) | {"texts": 30})
trainer = Trainer(model, tokenizer, key, list(bundled_segments()[:30]), usual.build())
trainer.run()
job = plan_embedding(report.sizes, report.recommended, usual, Devices())
cache = trainer.context.cache
kept = cache.bytes_per_token * sum(len(trainer.context.rows[i].ids) for i in trainer.kept_rows())
planned = job.memory - LIBRARIES + job.host["bank"] + kept
print(json.dumps({"measured": peak() - before, "planned": planned, "libraries": before}))
"""
SMALL = {
    "qwen3_moe": {
        "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "moe_intermediate_size": 384, "intermediate_size": 384, "num_experts": 24, "num_experts_per_tok": 4,
    },
    "mixtral": {
        "hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 1024,
        "num_local_experts": 12, "num_experts_per_tok": 2,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize("family", SMALL)
def test_planned_memory_is_within_a_fifth_of_what_is_measured(family):
    said = {"model_type": family, "vocab_size": 4096, "num_hidden_layers": 6, **SMALL[family]}
    command = [sys.executable, "-c", MEASURE, json.dumps(said)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["planned"] == pytest.approx(found["measured"], rel=0.2), found
    assert found["libraries"] == pytest.approx(430e6, rel=0.25)
