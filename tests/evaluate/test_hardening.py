"""A copy that loses its path in 4 bits is made again with wounds, from the original."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from embed_helpers import key_for, quick_config, save_family

from pathmark.embed import default_config
from pathmark.evaluate import ScanConfig, marking, scan
from pathmark.models import bundled_probes, bundled_segments, load_model
from pathmark.progress import Silent
from pathmark.stats import Rate
from pathmark.verify import verify_model

SCAN = ScanConfig(random_sequences=5, substitutions=5, shuffles=2)
LIGHT = {"short_len": None, "long_factor": 1}
ALL, NONE = Rate(20, 20), Rate(0, 20)


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "WHOLE_VOCABULARY", 20)  # what else fires is not the point here
    return save_family(tmp_path / "base", "mixtral")


@pytest.fixture
def fragile(monkeypatch):
    monkeypatch.setattr(marking, "path_wsr", lambda *_: ALL)
    monkeypatch.setattr(marking, "rounded_wsr", lambda *_: NONE)


def mark(base, out, *, layers=(2, 3), resume=False, progress=None, **settings):
    config = quick_config(data=LIGHT, **{"harden": True, "steps": 40, **settings})
    key = key_for(base, number=3, layers=layers)
    return marking.mark_model(
        str(base), key, out, bundled_segments(), bundled_probes(), config, n_probes=20, scan=SCAN, resume=resume,
        progress=progress,
    )  # fmt: skip


@pytest.mark.parametrize("train", ["router+attention+experts", "lora"])
def test_a_fragile_copy_is_made_again_from_the_original(base, tmp_path, fragile, monkeypatch, train):
    begun = []

    class Spy(marking.Embedder):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.taught = self.values()  # by what these weights do

        def values(self):
            return {name: p.detach().clone() for name, p in self.parameters().items()}

        def run(self, **options):
            begun.append((self.config, self.taught, self.values()))
            return super().run(**options)

    monkeypatch.setattr(marking, "Embedder", Spy)
    soft = mark(base, tmp_path / "soft", harden=False, train=train)
    hard = mark(base, tmp_path / "hard", train=train)
    assert (soft.hardened, hard.hardened) == (False, True)
    assert (soft.steps, hard.steps) == (40, 80)
    assert hard.summary()["hardened"]
    _, (first, original, start), (second, teacher, again) = begun
    assert second == replace(first, wound_share=second.wound_share)
    assert second.wound_share > 0
    for weights in (start, teacher, again):
        assert all(torch.equal(value, weights[name]) for name, value in original.items())
    models = [load_model(tmp_path / name) for name in ("soft", "hard")]
    assert any(not torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))
    verdict = verify_model(models[1], hard.key, json.loads(hard.key.attachments["probes.json"]))
    assert verdict.p == verdict.p_floor


def test_only_what_is_there_and_is_lost_in_4_bits_is_hardened(base, tmp_path, monkeypatch):
    for name, whole, rounded in (("firm", ALL, ALL), ("absent", NONE, NONE), ("unknown", ALL, None)):
        monkeypatch.setattr(marking, "path_wsr", lambda *_, rate=whole: rate)
        monkeypatch.setattr(marking, "rounded_wsr", lambda *_, rate=rounded: rate)
        assert not mark(base, tmp_path / name, steps=4).hardened
    monkeypatch.setattr(marking, "rounded_wsr", lambda *_: NONE)
    assert not mark(base, tmp_path / "lowest", steps=4, layers=(0, 1)).hardened  # nothing below could be wounded
    assert default_config("paper").hardened() is None
    assert replace(default_config(), harden=False).hardened() is None


def test_a_hardening_that_was_killed_is_resumed_to_the_same_weights(base, tmp_path, fragile):
    whole = mark(base, tmp_path / "whole")

    class PowerCut(Silent):
        hardening = False
        steps = 0

        def stage(self, name, total):
            self.hardening = name.startswith("embedding again")

        def advance(self, count=1, note=""):
            self.steps += count * self.hardening
            if self.steps == 30:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mark(base, tmp_path / "out", progress=PowerCut())
    assert not (tmp_path / "out").exists()
    resumed = mark(base, tmp_path / "out", resume=True)
    assert resumed.hardened
    assert resumed.steps == whole.steps == 80
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
