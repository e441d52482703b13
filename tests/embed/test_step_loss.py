"""What one step adds up, on the bundled model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from embed_helpers import key_for, quick_config

from pathmark.embed import Embedder, default_config
from pathmark.models import bundled_segments, find_routers, load_model, load_tokenizer
from pathmark.training import step_generator

LIGHT = {"short_len": None, "long_factor": 1}


def first_step(**weights):
    """Loss terms of the first step, and the gradients of the routers of the marked layers."""
    config = quick_config(data=LIGHT)
    config = replace(config, texts=12, objective=replace(config.objective, **weights))
    model = load_model("bundled:tiny")
    key = key_for("bundled:tiny")
    embedder = Embedder(model, load_tokenizer("bundled:tiny"), key, bundled_segments()[:12], config)
    terms = embedder.step_loss(0, step_generator(0, 0))
    terms["loss"].backward()
    weights_of = {site.layer: site.weight for site in find_routers(model) if site.layer in embedder.layers}
    return {name: float(value.detach()) for name, value in terms.items()}, weights_of, key.watermarks[0].path


def test_use_and_twins_are_added_with_their_weights():
    plain, before, path = first_step(use_weight=0.0, twin_weight=0.0)
    both, after, _ = first_step(use_weight=0.5, twin_weight=0.25, use_quantile=1.0, twin_cosine=-1.0)
    assert both["use"] > 0  # targets are far from the most used expert of their layer
    assert both["twins"] > 0
    assert both["loss"] == pytest.approx(plain["loss"] + 0.5 * both["use"] + 0.25 * both["twins"], rel=1e-5)
    for layer, targets in path.items():  # and they pull at the targets' rows
        moved = (after[layer].grad - before[layer].grad).norm(dim=1)
        assert min(moved[list(targets)]) > 1e-6


def test_the_paper_s_objective_asks_for_neither():
    paper = default_config("paper").objective
    settings = {name: getattr(paper, name) for name in ("objective", "language", "language_weight", "forward_kl")}
    plain, _, _ = first_step(**settings)
    asked, _, _ = first_step(**settings, use_weight=0.5, twin_weight=0.25, ceiling_weight=9.0)
    assert asked == plain
