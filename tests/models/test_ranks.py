"""How the processes of torchrun join; what they then do together is in tests/training/test_parallel.py."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist
import zoo

import pathmark
from pathmark.models import ranks
from pathmark.models.devices import Placement


def pretend_to_join(monkeypatch):
    """Two processes were announced; what they join with is kept."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    asked = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: asked.append((backend, timeout)))
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", asked.append)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: asked.append(number))
    monkeypatch.setattr(ranks, "world", lambda: 2)
    return asked


def test_on_cuda_figures_and_checkpoints_go_over_gloo(monkeypatch):
    asked = pretend_to_join(monkeypatch)
    with ranks.joined(torch.device("cuda:1")):
        pass
    number, (backends, arrival), patience = asked
    assert number == 1
    assert backends == "cpu:gloo,cuda:nccl"  # nccl alone refuses what is on the CPU
    assert arrival <= timedelta(minutes=10)
    assert patience >= timedelta(hours=12)  # the first one may write and hash for hours
    with ranks.joined(torch.device("cpu")):
        pass
    assert asked[3][0] == "gloo"


def test_an_attack_joins_before_it_loads(monkeypatch):
    asked = pretend_to_join(monkeypatch)
    model = zoo.tiny_model("qwen3_moe")

    def load(*_):
        assert asked, "loaded before the processes knew each other"
        return model

    monkeypatch.setattr(import_module("pathmark.front_door.attack"), "load_fast", load)
    placement = Placement(device="cpu")
    config = pathmark.AttackConfig(settings={"seed": 3}, tokenizer=object(), parallel="ddp", placement=placement)
    monkeypatch.setattr("pathmark.training.parallel.world", lambda: 2)
    pathmark.attack("permute-experts", "somewhere", config=config)
