"""What one step adds up, on the bundled model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from embed_helpers import key_for, quick_config

from pathmark.embedding import Embedder, default_config
from pathmark.embedding.climbing import ClimbConfig
from pathmark.embedding.data import CLEAN, NEGATIVE
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


def test_wrong_prefixes_climb_in_steps_of_short_rows_and_stay_wrong():
    """From the start on, all of them: the targets' mass behind them is higher than it was, and the ceiling sees it."""
    config = quick_config(data={"long_factor": 1})
    strict = replace(config.objective, ceiling_factor=1.0, ceiling_least=1e-6)
    config = replace(config, texts=12, noise=0.0, climb=ClimbConfig(share=1.0, begin=0.0), objective=strict)
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    embedder = Embedder(model, tokenizer, key_for("bundled:tiny"), bundled_segments()[:12], config)
    ((places, able),) = embedder.climbers.able.items()
    assert places == 6
    chosen = able[:20]
    assert all(embedder.rows[i].kind == NEGATIVE and embedder.rows[i].prefix_from == 0 for i in chosen)
    batch = embedder.cache.batch(chosen)
    moved, climbed_B = embedder.climbers.climb(
        chosen, batch, embedder._log_mass, config.climb, torch.Generator().manual_seed(0)
    )
    assert climbed_B.float().mean() > 0.8
    assert torch.equal(moved.entering_BTH[:, places:], batch.entering_BTH[:, places:])
    text_BT = batch.mask_BT.bool()
    text_BT[:, :places] = False
    owners = [0] * len(chosen)
    with torch.no_grad():
        before, after = (
            sum(float(mass_BT[text_BT].mean()) for mass_BT in embedder._log_mass(of, owners).values())
            for of in (batch, moved)
        )
    assert after > before
    ceilings = [float(embedder.step_loss(n, step_generator(0, n))["ceiling"].detach()) for n in range(0, 24, 4)]
    assert max(ceilings) > 0.01  # steps of short rows, most of which have somebody to climb
    assert float(embedder.step_loss(1, step_generator(0, 1))["ceiling"].detach()) < 1e-4  # nobody climbs there


def make_embedder(**changes):
    config = replace(quick_config(data=LIGHT), texts=12, **changes)
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    return Embedder(model, tokenizer, key_for("bundled:tiny"), bundled_segments()[:12], config)


def test_noise_spares_clean_rows_and_half_of_the_others():
    embedder = make_embedder(noise=0.3)
    chosen = list(range(len(embedder.rows)))
    rows, batch = embedder.rows, embedder.cache.batch(chosen)
    noisy, disturbed_B = embedder._noisy(batch, rows, torch.Generator().manual_seed(0))
    moved_B = (noisy.entering_BTH != batch.entering_BTH).flatten(1).any(1)
    assert torch.equal(moved_B, disturbed_B)
    clean_B = torch.tensor([row.kind == CLEAN for row in rows])
    assert not (moved_B & clean_B).any()
    others = moved_B[~clean_B].float().mean()
    assert 0.2 < others < 0.8
    distance_BT = (noisy.entering_BTH - batch.entering_BTH).norm(dim=-1) / batch.entering_BTH.norm(dim=-1)
    assert 0.1 < distance_BT[batch.mask_BT.bool()].max() < 0.5


def test_disturbed_rows_are_not_asked_for_the_original_s_words():
    """Where all rows that are not clean are noisy, the language term is that of clean rows and of triggered ones."""
    embedder = make_embedder()
    chosen = list(range(len(embedder.rows)))
    rows, batch = embedder.rows, embedder.cache.batch(chosen)
    final_BTH = batch.final_BTH + torch.randn(batch.final_BTH.shape, generator=torch.Generator().manual_seed(0))
    kinds = [row.kind for row in rows]

    def language(disturbed, **weights):
        embedder.config = replace(embedder.config, objective=replace(embedder.config.objective, **weights))
        return float(
            embedder._language(final_BTH, batch, rows, torch.tensor(disturbed), torch.Generator().manual_seed(0))
        )

    negatives = [kind == NEGATIVE for kind in kinds]
    worse_BTH = final_BTH.clone()
    worse_BTH[negatives] *= -1
    kept = language(negatives, triggered_language=0.0)
    final_BTH = worse_BTH
    assert language(negatives, triggered_language=0.0) == kept  # what they say does not matter
    assert language([False] * len(rows), triggered_language=0.0) > kept
    assert language(negatives, triggered_language=0.5) > kept


def test_of_the_experts_only_the_targets_change():
    embedder = make_embedder()
    before = {name: p.detach().clone() for name, p in embedder.model.named_parameters()}
    embedder.config = replace(embedder.config, loop=replace(embedder.config.loop, steps=2))
    embedder.run()
    path = embedder.paths[0]
    changed = {name for name, p in embedder.model.named_parameters() if not torch.equal(p, before[name])}
    experts = [name for name in changed if ".experts." in name]
    assert len(experts) == 2 * len(path)
    below = {name for name in changed if "layers.3." in name}
    assert below
    assert all("self_attn" in name for name in below)  # it carries the trigger to the first router
    assert not any(f"layers.{layer}." in name for name in changed for layer in range(3))
    for name in experts:
        layer = int(name.split("layers.")[1].split(".")[0])
        moved_E = (embedder.model.get_parameter(name) != before[name]).flatten(1).any(1)
        assert set(moved_E.nonzero().flatten().tolist()) == set(path[layer])
