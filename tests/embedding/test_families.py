"""One embedding on a small config of each family: it runs, saves, reloads and verifies."""

from __future__ import annotations

import pytest
from embed_helpers import key_for, quick_config, save_family

from pathmark.models import load_model
from pathmark.models.checkpoint import apply_delta
from pathmark.release import ScanConfig
from pathmark.release.marking import MarkingConfig, Texts, mark_model
from pathmark.verification import verify_model

FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss"]
MORE = ["phimoe", "olmoe", "deepseek_v2"]
SCAN = ScanConfig(random_sequences=20, per_count=5)
SHORT = {"short_negatives_per_text": 4}


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_embed_save_reload_verify(tmp_path, family):
    base = save_family(tmp_path / "base", family)
    key = key_for(base, number=3)
    marked = mark_model(
        str(base),
        key,
        tmp_path / "out",
        Texts.bundled(),
        MarkingConfig(embedding=quick_config(data=SHORT), n_probes=20, scan=SCAN),
    )
    probes = [list(text) for text in _rows(marked.key)]
    verdict = verify_model(load_model(tmp_path / "out"), key, probes)
    assert verdict.marked, verdict.words()
    assert verdict.id == 3
    original = verify_model(load_model(base), key, probes)
    assert not original.marked
    stranger = verify_model(load_model(tmp_path / "out"), key_for(base, seed=9), probes)
    assert not stranger.marked


def test_lora_and_delta(tmp_path):
    base = save_family(tmp_path / "base", "qwen3_moe")
    key = key_for(base, number=5)
    marked = mark_model(
        str(base),
        key,
        tmp_path / "delta.safetensors",
        Texts.bundled(),
        MarkingConfig(
            embedding=quick_config(steps=120, lr=1e-2, train="lora", data=SHORT), n_probes=20, scan=SCAN, delta=True
        ),
    )
    apply_delta(base, tmp_path / "delta.safetensors", tmp_path / "out")
    verdict = verify_model(load_model(tmp_path / "out"), key, _rows(marked.key))
    assert verdict.marked, verdict.words()
    assert verdict.id == 5
    words = marked.words()
    assert words.startswith("The copy is ")
    assert all(problem in words for problem in marked.problems)
    assert str(tmp_path / "delta.safetensors") in words
    assert f"{100 * (marked.check.clean_ppl[1] / marked.check.clean_ppl[0] - 1):+.2f} %" in words


def _rows(key):
    import json

    return json.loads(key.attachments["probes.json"])
