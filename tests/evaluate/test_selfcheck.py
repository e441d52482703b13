"""The self-check's look at a copy in 4 bits."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from pathmark.attacks.kit import Kit
from pathmark.attacks.quantization import RoundToNearest, round_to_nearest
from pathmark.evaluate import selfcheck
from pathmark.evaluate.selfcheck import SelfCheck
from pathmark.models import bundled_probes, load_model, load_tokenizer
from pathmark.stats import Rate
from pathmark.verify import encode_probes, verify_model


def test_a_copy_in_4_bits_is_measured_beside_the_released_one(case, monkeypatch):
    model = load_model(case.marked).eval()
    probes = encode_probes(load_tokenizer(case.marked), bundled_probes(), n_probes=12, length=64)
    assert selfcheck.rounded_wsr(model, case.key, probes, 0.8) is None  # rows that are no multiple of 32 long
    monkeypatch.setattr(selfcheck, "RoundToNearest", partial(RoundToNearest, group_size=8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measured = selfcheck.rounded_wsr(model, case.key, probes, 0.8)
    rounded = round_to_nearest(model, RoundToNearest(bits=4, group_size=8), Kit())
    assert measured == verify_model(rounded, case.key, probes).wsr
    assert verify_model(model, case.key, probes).wsr.hits > 0
    with monkeypatch.context() as patched:  # what the rounding gives is what is measured, and it is asked for 4 bits
        asked = []
        unmarked = load_model(case.base).eval()
        patched.setattr(selfcheck, "round_to_nearest", lambda _, config, kit: asked.append(config) or unmarked)
        assert selfcheck.rounded_wsr(model, case.key, probes, 0.8) == Rate(0, len(probes))
        assert [config.bits for config in asked] == [4]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    little = SimpleNamespace(available=model.get_memory_footprint())
    monkeypatch.setattr(selfcheck.psutil, "virtual_memory", lambda: little)
    assert selfcheck.rounded_wsr(model, case.key, probes, 0.8) is None  # no room for a second one


@pytest.mark.parametrize(("rate", "fragile"), [(Rate(100, 100), False), (Rate(94, 100), True), (None, False)])
def test_fragile_means_that_4_bits_lose_the_path(rate, fragile):
    check = SelfCheck(**{field.name: None for field in fields(SelfCheck)} | {"wsr_rounded": rate})
    assert check.fragile is fragile
