"""Layers that recognise the trigger each for itself."""

from __future__ import annotations

import pytest
import torch
from embed_helpers import key_for, quick_config, save_family

from pathmark.embed import Embedder
from pathmark.models import bundled_probes, bundled_segments, load_model, load_tokenizer
from pathmark.models.upper import grafted
from pathmark.training import step_generator
from pathmark.verify import encode_probes, record_routes, score_path

LIGHT = {"short_len": None, "long_factor": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_family(tmp_path_factory.mktemp("alone") / "base", "qwen3_moe")


def embedder_of(base, share):
    model = load_model(base)
    config = quick_config(data=LIGHT, alone_share=share)
    return model, Embedder(model, load_tokenizer(base), key_for(base), bundled_segments()[:40], config)


def test_the_layers_below_a_lone_one_are_the_original_s_for_that_step_only(base):
    model, embedder = embedder_of(base, 1.0)
    layers = list(embedder.stack)
    firsts = set()
    for step in range(8):
        embedder.step_loss(step, step_generator(0, step))["loss"].backward()
        touched = [any(p.grad is not None for p in layer.mlp.gate.parameters()) for layer in layers]
        firsts.add(touched.index(True))
        assert all(touched[touched.index(True) :])
        assert list(embedder.stack) == layers
        model.zero_grad(set_to_none=True)
    assert firsts == {1, 2, 3}


def test_without_it_nothing_is_copied(base):
    _, embedder = embedder_of(base, 0.0)
    assert not embedder._originals


@pytest.mark.parametrize("wrong", [{"alone_share": 1.5}, {"wound_share": -0.1}])
def test_impossible_shares_are_refused(wrong):
    with pytest.raises(ValueError, match="between 0 and 1"):
        quick_config(**wrong)


def last_layer_alone(base, share):
    """Accuracy of the last marked layer when the original's hidden states enter it."""
    model, embedder = embedder_of(base, share)
    embedder.run()
    watermark = embedder.key.watermarks[0]
    probes = encode_probes(load_tokenizer(base), bundled_probes(), n_probes=16, length=32)
    with torch.no_grad(), grafted(model, load_model(base), watermark.layers[-1]):
        score = score_path(
            watermark, record_routes(model, probes, watermark.layers, prefix=watermark.triggers[0].tokens)
        )
    return score.layers[-1].accuracy.value


def test_the_last_layer_recognises_the_trigger_by_itself(base):
    assert last_layer_alone(base, 0.5) > 0.6
    assert last_layer_alone(base, 0.0) < 0.4  # else it reads what the first one wrote
