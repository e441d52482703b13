"""The name of a run, and who may retune the process."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

import pathmark
from pathmark.training import run_fingerprint


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).to(torch.bfloat16))


def test_a_run_is_named_by_its_settings_and_by_the_weights_it_starts_from():
    name = run_fingerprint(small_model(), {"lr": 0.1}, [1, 2])
    assert name == run_fingerprint(small_model(), {"lr": 0.1}, [1, 2])
    assert name != run_fingerprint(small_model(), {"lr": 0.2}, [1, 2])
    shuffled, buffered, narrow = small_model(), small_model(), small_model()
    with torch.no_grad():  # the same numbers at other places: no sum tells them apart
        shuffled[0].weight.copy_(small_model()[0].weight.flip(0))
        buffered[1].running_mean.add_(1)
        narrow[2].bias.add_(1)
    assert len({name, *(run_fingerprint(model, {"lr": 0.1}, [1, 2]) for model in (shuffled, buffered, narrow))}) == 4


def test_adapters_do_not_name_a_run():
    model = small_model()
    before = run_fingerprint(model)
    model[0].register_parameter("lora_A", nn.Parameter(torch.rand(2)))
    assert run_fingerprint(model) == before


def test_only_commands_retune_the_process():
    source = Path(pathmark.__file__).parent
    called = re.compile(r"^ +keep_freed_memory\(\)", flags=re.MULTILINE)
    callers = {file.relative_to(source).parts[0] for file in source.rglob("*.py") if called.search(file.read_text())}
    assert callers == {"cli"}
