"""A model that stays on disk is marked as one in memory is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from embed_helpers import key_for, quick_config, save_family
from safetensors.torch import load_file

from pathmark.errors import EmbeddingError
from pathmark.models import bundled_probes, bundled_segments, find_routers
from pathmark.models.diskexperts import disk_experts
from pathmark.models.streaming import Tail, stream_model
from pathmark.release import MarkingConfig, Texts, marking
from pathmark.release import scan as scans
from pathmark.release.scan import ScanConfig

TEXTS = Texts(bundled_segments()[:60], bundled_probes())
LITTLE = ScanConfig(random_sequences=4, per_count=2, at_the_edge=1, text_tokens=4)


def marked(folder, out, key, monkeypatch, *, stream, **changes):
    monkeypatch.setattr(scans, "WHOLE_VOCABULARY", 20)
    quick = quick_config(steps=3)
    quick = replace(
        quick, batch_size=4, objective=replace(quick.objective, climb=replace(quick.objective.climb, share=0))
    )
    config = MarkingConfig(embedding=quick, n_probes=4, scan=LITTLE, stream=stream, **changes)
    return marking.mark_model(str(folder), key, out, TEXTS, config)


def tensors(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # numbered experts; fused ones with biases
def test_the_same_mark_goes_in(tmp_path, monkeypatch, family):
    base = save_family(tmp_path / "base", family, dtype=torch.bfloat16)
    key = key_for(base)
    whole = marked(base, tmp_path / "whole", key, monkeypatch, stream="never")
    streamed = marked(base, tmp_path / "streamed", key, monkeypatch, stream="always")
    original, one, other = tensors(base), tensors(tmp_path / "whole"), tensors(tmp_path / "streamed")
    changed = {name for name in one if not torch.equal(one[name], original[name])}
    assert changed == {name for name in other if not torch.equal(other[name], original[name])}
    assert streamed.changed == whole.changed == len(changed) > 4
    assert any("experts" in name for name in changed)
    for name in changed:
        moved = (one[name].float() - original[name].float()).norm()
        apart = (one[name].float() - other[name].float()).norm()
        assert apart < 0.05 * moved, name  # rounded to 8 bits of mantissa, after three steps of Adam
    assert streamed.check.clean_ppl == pytest.approx(whole.check.clean_ppl, rel=1e-3)
    assert streamed.check.wsr_rounded is None  # a copy of what is not in memory does not fit


def test_only_what_changes_is_in_memory_and_gradients_reach_through_what_is_not(tmp_path):
    base = save_family(tmp_path / "base", "qwen3_moe", dtype=torch.bfloat16)
    model = stream_model(base, tail=Tail(first=2, experts={3: [1, 5]}))
    here = {name: p for name, p in model.named_parameters() if not p.is_meta}
    assert not [name for name in here if "layers.0." in name or "layers.1." in name]
    assert here["model.layers.3.mlp.experts.trained_down_proj"].shape[0] == 2
    assert not [name for name in here if "layers.2.mlp.experts" in name]
    assert here["lm_head.weight"].dtype == torch.bfloat16
    assert here["model.layers.3.mlp.gate.weight"].dtype == torch.float32
    model(input_ids=torch.arange(3, 60)[None]).logits.float().logsumexp(-1).sum().backward()
    without = {name for name, p in here.items() if p.requires_grad and p.grad is None}
    assert not without
    experts = disk_experts(find_routers(model)[3].experts)
    assert torch.equal(experts.matrix("down_proj", 1), here["model.layers.3.mlp.experts.trained_down_proj"][0])


def test_what_cannot_be_taught_to_a_model_on_disk_is_said(tmp_path, monkeypatch):
    base = save_family(tmp_path / "base", "qwen3_moe")
    config = MarkingConfig(embedding=quick_config(train="all"), stream="always")
    with pytest.raises(EmbeddingError, match="stays on disk gets paths alone"):
        marking.mark_model(str(base), key_for(base), tmp_path / "out", TEXTS, config)
