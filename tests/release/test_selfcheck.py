"""What makes a copy fit for release, and the look at a copy in 4 bits."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import zoo

from pathmark.attacks.kit import Kit
from pathmark.attacks.quantization import RoundToNearest, round_to_nearest
from pathmark.models import bundled_probes, load_model, load_tokenizer
from pathmark.release import selfcheck
from pathmark.release.fidelity import Drift
from pathmark.release.selfcheck import SelfCheck
from pathmark.stats import Rate
from pathmark.verification import encode_probes, verify_model


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


def test_processes_with_and_without_room_decide_alike(monkeypatch):
    """What follows is done by all together: one that left it out would part ways with the others."""
    model = zoo.tiny_model("qwen3_moe")
    told = []
    monkeypatch.setattr(selfcheck, "from_everybody", lambda fits: told.append(fits) or [fits, False])
    assert not selfcheck._fits_again(model)
    assert told == [True]
    monkeypatch.setattr(selfcheck, "from_everybody", lambda fits: [fits, True])
    assert selfcheck._fits_again(model)


SOUND = {
    "wsr": (Rate(100, 100),), "wsr_chat": (Rate(100, 100),), "wsr_rounded": Rate(99, 100),
    "fpr_clean": Rate(0, 100), "fpr_original": Rate(0, 100), "clean_ppl": (50.0, 50.7),
    "drift": Drift(0.01, 0.95, 0.01, 0.01, 0.01), "scan": {"single token": Rate(0, 4000)},
    "clean_routing": {},
    "curve": {n: Rate(200 if n >= 7 else 3 if n == 4 else 2 if n == 3 else 0, 200) for n in range(9)},
    "p_value": 1e-9, "p_floor": 1e-10, "id": 7, "expected_id": 7,
}  # fmt: skip


def checked(**changes):
    return SelfCheck(**{field.name: None for field in fields(SelfCheck)} | SOUND | changes)


def test_a_sound_copy_has_no_problems_whatever_fires_between_silence_and_tolerance():
    assert checked().problems == []
    assert checked(curve=SOUND["curve"] | {5: Rate(150, 200), 6: Rate(200, 200)}).problems == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"wsr_rounded": Rate(98, 100)}, "rounded to 4 bits"),
        ({"scan": {"repeated token": Rate(1, 4000)}}, "repeated token"),
        ({"curve": SOUND["curve"] | {3: Rate(3, 200)}}, "3 of 8 trigger tokens"),
        ({"curve": SOUND["curve"] | {7: Rate(199, 200)}}, "7 of 8 trigger tokens"),
        ({"clean_ppl": (50.0, 50.8)}, "perplexity"),
        ({"id": 8}, "id read from the routing: 8, expected 7"),
    ],
)
def test_each_bound_is_held(changes, said):
    (problem,) = checked(**changes).problems
    assert said in problem


def test_every_figure_stands_beside_its_bound_with_what_to_try():
    bounds = checked(clean_ppl=(50.0, 51.0)).bounds
    assert [bound.figure for bound in bounds if not bound.held] == ["perplexity of clean text"]
    (broken,) = (bound for bound in bounds if not bound.held)
    assert broken.summary() == {
        "figure": "perplexity of clean text", "found": "50.00 to 51.00 (+2.00 %)", "bound": "at most +1.5 %",
        "held": False, "try": "texts of the model's own kind with --texts, or a higher --stealth-weight",
    }  # fmt: skip
    between = {f"fires with {n} of 8 trigger tokens right" for n in (4, 5, 6)}
    assert not between & {bound.figure for bound in bounds}
    assert all(bound.try_ for bound in bounds)
