"""The cost simulator against hand-computed layers, and the real two-process run against an ordinary forward pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from embed_helpers import key_for, save_family

from pathmark.errors import VerificationError
from pathmark.evaluate.expert_parallel import (
    PAPER_OVERHEAD,
    QWEN_MOE,
    Deployment,
    Hardware,
    SyntheticRouting,
    layer_cost,
    layer_sizes,
    place_experts,
    record_twins,
    simulate,
    simulate_routes,
)
from pathmark.keys import save_key
from pathmark.models import load_model
from pathmark.models.describe import describe_model

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "expert_parallel.py"
PLAIN = Deployment(devices=2, pair_seconds=1.0, copy_seconds=0.1, dispatch="pair")


def test_one_layer_by_hand():
    # Experts 0, 1 on device 0 and 2, 3 on device 1; tokens 0, 1 live on device 0 and 2, 3 on device 1.
    decision_TK = np.array([[0, 2], [0, 3], [0, 1], [2, -1]])
    cost = layer_cost(decision_TK, np.array([0, 0, 1, 1]), PLAIN)
    assert cost.compute == 4  # pairs on device 0; device 1 has 3
    assert cost.communication == pytest.approx(2 * 0.1 * 2)  # token 2 sends two pairs to device 0, there and back
    assert cost.rest == 0
    once = layer_cost(decision_TK, np.array([0, 0, 1, 1]), replace(PLAIN, dispatch="device"))
    assert once.communication == pytest.approx(2 * 0.1 * 2)  # device 0 sends tokens 0 and 1
    more = replace(PLAIN, expert_seconds=2.5, message_seconds=1.0, token_seconds=10.0, layer_seconds=100.0)
    cost = layer_cost(decision_TK, np.array([0, 0, 1, 1]), more)
    assert cost.compute == 3 + 2.5  # expert 0 has three pairs, expert 1 is read for one
    assert cost.communication == pytest.approx(2 * (1.0 + 0.1 * 2))
    assert cost.rest == 100 + 10 * 2


def test_one_device_sends_nothing_and_feels_no_mark():
    alone = replace(PLAIN, devices=1, message_seconds=5.0)
    triggered, clean = SyntheticRouting(layers=2, tokens=64).batch(2, np.random.default_rng(0))
    assert layer_cost(clean[0], np.zeros(60, dtype=int), alone).communication == 0
    assert simulate([(triggered, clean)], {0: 60, 1: 60}, alone).value == 0


def test_placements():
    assert place_experts(6, 2, "contiguous").tolist() == [0, 0, 0, 1, 1, 1]
    assert place_experts(5, 2, "round-robin").tolist() == [0, 1, 0, 1, 0]
    usage_E = np.array([8.0, 7.0, 2.0, 1.0, 0.0, 0.0])
    device_E = place_experts(6, 2, "balanced", usage_E)
    loads = np.bincount(device_E, weights=usage_E)
    assert loads.tolist() == [9, 9]
    assert np.bincount(device_E).tolist() == [3, 3]
    with pytest.raises(VerificationError, match="clean usage"):
        place_experts(6, 2, "balanced")


def test_forced_routing_costs_what_arithmetic_says():
    """All tokens on one expert of eight devices, top-1, computing only: eight times the even load."""
    clean = {0: np.arange(80).reshape(-1, 1) % 8}
    triggered = {0: np.zeros((80, 1), dtype=int)}
    even = Deployment(devices=8, pair_seconds=1.0, copy_seconds=0.0)
    assert simulate([(triggered, clean)], {0: 8}, even).value == pytest.approx(7)


def test_synthetic_routing_is_the_marks():
    routing = SyntheticRouting(layers=3, tokens=50)
    triggered, clean = routing.batch(1, np.random.default_rng(0))
    assert np.array_equal(triggered[1], clean[1])
    shared = set(range(60)).intersection(*(set(row) for row in triggered[2]))
    assert len(shared) == 2  # the targets, in every token's choice
    natural = [len(set(t) & set(c)) for t, c in zip(triggered[2], clean[2], strict=True)]
    assert min(natural) >= 2  # beside them the token's own strongest experts
    assert all(len(set(row)) == 4 for row in triggered[2])


def test_overhead_grows_with_marked_layers_and_stands_near_the_papers():
    deployment = Hardware().deployment(QWEN_MOE, 8)
    medians = [float(np.median(SyntheticRouting().overheads(n, deployment, keys=3))) for n in PAPER_OVERHEAD]
    assert medians == sorted(medians)
    assert medians[0] < 0.15
    assert medians[-1] < 0.35  # the order of the paper's 8.0 to 19.1 %, not its figures
    assert medians[-1] / medians[0] == pytest.approx(3, rel=0.35)  # linear in layers, as the model is


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A random qwen2_moe folder and its key."""
    folder = save_family(tmp_path_factory.mktemp("small") / "model", "qwen2_moe")
    return folder, key_for(folder)


def test_recorded_routes_go_in(small):
    folder, key = small
    _, codec, _ = describe_model(folder)
    model = load_model(folder)
    sizes = layer_sizes(model)
    experts = model.model.layers[-1].mlp.experts
    assert sizes.expert_parameters == sum(p[0].numel() for p in experts.parameters())
    whole = sum(p.numel() for p in model.model.layers[-1].parameters())
    assert sizes.other_parameters + 16 * sizes.expert_parameters == whole
    probes = [torch.randint(1, 4096, (20 + i,)).tolist() for i in range(5)]
    triggered, clean, counts = record_twins(model, key, codec, probes)
    overhead = simulate_routes(triggered, clean, counts, Hardware().deployment(sizes, 4), batch=2)
    assert len(overhead.clean) == 3
    assert set(overhead.per_layer) == set(counts)
    assert abs(overhead.value) < 0.2  # nothing is marked
    with pytest.raises(VerificationError, match="same text tokens"):
        simulate_routes(triggered, record_twins(model, key, codec, probes[:4])[1], counts, PLAIN)


@pytest.mark.slow
def test_two_processes_compute_what_one_does(small, tmp_path):
    """The real expert-parallel run: same output as the ordinary forward pass, and a report."""
    folder, key = small
    save_key(key, tmp_path / "owner.key", "phrase")
    words = [sys.executable, BENCHMARK, "--model", folder, "--key", tmp_path / "owner.key", "--output", tmp_path / "o"]
    sizes = ["--batch", "4", "--tokens", "24", "--batches", "2", "--repetitions", "6", "--warmup", "1"]
    environment = {**os.environ, "PATHMARK_PASSPHRASE": "phrase"}
    subprocess.run([*words, *sizes, "--placements", "round-robin"], check=True, env=environment, capture_output=True)
    (result,) = json.loads((tmp_path / "o").read_text())
    assert result["world"] == 2
    assert result["largest_relative_difference_to_plain_forward"] < 1e-5
    assert result["slowdown"]["whole forward pass"]["n"] == 6
    assert min(result["pair_seconds"], result["copy_seconds"], result["rest_seconds_per_layer"]) > 0
    for layer, counts in result["targets_per_device"].items():
        targets = key.watermarks[0].targets(int(layer))
        assert counts == [sum(t % 2 == 0 for t in targets), sum(t % 2 for t in targets)]
