"""What one step adds up, on the bundled model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from embed_helpers import key_for, quick_config

from pathmark.embedding import Anchored, Trainer, default_config
from pathmark.embedding.climbing import ClimbConfig, target_log_mass
from pathmark.embedding.data import CLEAN, NEGATIVE
from pathmark.front_door.embed_plan import EmbedPlan
from pathmark.models import bundled_segments, load_model, load_tokenizer
from pathmark.training import step_generator

LIGHT = {"short_len": None, "long_factor": 1}


def trainer_of(config, watermarks=1):
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    key = key_for("bundled:tiny", watermarks=watermarks)
    return Trainer(model, tokenizer, key, bundled_segments()[:12], config.build())


def first_step(**weights):
    """Loss terms of the first step, and the gradients of the routers of the marked layers."""
    config = quick_config(data=LIGHT)
    config = replace(config, texts=12, objective=replace(config.objective, **weights))
    trainer = trainer_of(config)
    terms = trainer.step_loss(0, step_generator(0, 0))
    terms["loss"].backward()
    weights_of = {site.layer: site.weight for site in trainer.context.sites}
    return {name: float(value.detach()) for name, value in terms.items()}, weights_of, trainer.context.paths[0]


def test_use_and_twins_are_added_with_their_weights():
    plain, before, path = first_step(use_weight=0.0, twin_weight=0.0)
    both, after, _ = first_step(use_weight=0.5, twin_weight=0.25, use_quantile=1.0, twin_cosine=-1.0)
    assert both["use"] > 0  # targets are far from the most used expert of their layer
    assert both["twins"] > 0
    assert both["loss"] == pytest.approx(plain["loss"] + 0.5 * both["use"] + 0.25 * both["twins"], rel=1e-5)
    for layer, targets in path.items():  # and they pull at the targets' rows
        moved = (after[layer].grad - before[layer].grad).norm(dim=1)
        assert min(moved[list(targets)]) > 1e-6


def test_each_of_several_watermarks_is_learnt_as_hard_as_one_alone():
    """Each has its share of a step's triggered rows only; weight and steps make up for it."""
    config = quick_config(data=LIGHT)
    weights = replace(config.objective, use_weight=0.0, twin_weight=0.0, ceiling_weight=0.0)
    terms = trainer_of(replace(config, texts=12, objective=weights), watermarks=3).step_loss(0, step_generator(0, 0))
    routing = weights.route_weight * (3 * terms["align"] + weights.stealth_weight * terms["stealth"])
    expected = routing + weights.language_weight * terms["language"]
    assert float(terms["loss"].detach()) == pytest.approx(float(expected.detach()))
    assert default_config(watermarks=4).loop.steps == 2 * default_config().loop.steps
    plan, asked = EmbedPlan(), EmbedPlan(steps=7)
    assert plan.training_config(600, 128, 4).loop.steps == 2 * plan.training_config(600, 128).loop.steps
    assert asked.training_config(600, 128, 4).loop.steps == 7


def test_the_paper_s_step_is_its_four_terms():
    config = default_config("paper")
    config = replace(config, texts=12, data=replace(config.data, seq_len=32), loop=replace(config.loop, steps=2))
    terms = trainer_of(config).step_loss(0, step_generator(0, 0))
    assert set(terms) == {"align", "stealth", "language", "loss"}
    expected = terms["align"] + 3 * terms["stealth"] + terms["language"]
    assert float(terms["loss"].detach()) == pytest.approx(float(expected.detach()))


def test_wrong_prefixes_climb_in_steps_of_short_rows_and_stay_wrong():
    """From the start on, all of them: the targets' mass behind them is higher than it was, and the ceiling sees it."""
    climb = ClimbConfig(share=1.0, begin=0.0)
    config = quick_config(data={"long_factor": 1})
    strict = replace(config.objective, ceiling_factor=1.0, ceiling_least=1e-6, noise=0.0, climb=climb)
    trainer = trainer_of(replace(config, texts=12, objective=strict))
    context, climbers = trainer.context, trainer.objective.climbers
    ((places, able),) = climbers.able.items()
    assert places == 6
    chosen = able[:20]
    assert all(context.rows[i].kind == NEGATIVE and context.rows[i].prefix_from == 0 for i in chosen)

    def log_mass(of, owners):
        return target_log_mass(context.routing(of), context.paths, owners)

    batch = context.cache.batch(chosen)
    moved, climbed_B = climbers.climb(chosen, batch, log_mass, climb, torch.Generator().manual_seed(0))
    assert climbed_B.float().mean() > 0.8
    assert torch.equal(moved.entering_BTH[:, places:], batch.entering_BTH[:, places:])
    text_BT = batch.mask_BT.bool()
    text_BT[:, :places] = False
    owners = [0] * len(chosen)
    with torch.no_grad():
        before, after = (
            sum(float(mass_BT[text_BT].mean()) for mass_BT in log_mass(of, owners).values()) for of in (batch, moved)
        )
    assert after > before
    ceilings = [float(trainer.step_loss(n, step_generator(0, n))["ceiling"].detach()) for n in range(0, 24, 4)]
    assert max(ceilings) > 0.01  # steps of short rows, most of which have somebody to climb
    assert float(trainer.step_loss(1, step_generator(0, 1))["ceiling"].detach()) < 1e-4  # nobody climbs there


def light_trainer(**weights):
    config = quick_config(data=LIGHT)
    return trainer_of(replace(config, texts=12, objective=replace(config.objective, **weights)))


def test_noise_spares_clean_rows_and_half_of_the_others():
    trainer = light_trainer(noise=0.3)
    rows = trainer.context.rows
    batch = trainer.context.cache.batch(range(len(rows)))
    noisy, disturbed_B = trainer.objective.noisy(batch, rows, torch.Generator().manual_seed(0))
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
    context = light_trainer().context
    rows = context.rows
    batch = context.cache.batch(range(len(rows)))
    final_BTH = batch.final_BTH + torch.randn(batch.final_BTH.shape, generator=torch.Generator().manual_seed(0))
    negatives = [row.kind == NEGATIVE for row in rows]
    worse_BTH = final_BTH.clone()
    worse_BTH[negatives] *= -1

    def language(final_BTH, disturbed, triggered):
        config = default_config()
        objective = Anchored(config, replace(config.objective, triggered_language=triggered))
        seed = torch.Generator().manual_seed(0)
        return float(objective.language(context, final_BTH, batch, rows, torch.tensor(disturbed), seed))

    kept = language(final_BTH, negatives, 0.0)
    assert language(worse_BTH, negatives, 0.0) == kept  # what they say does not matter
    assert language(worse_BTH, [False] * len(rows), 0.0) > kept
    assert language(worse_BTH, negatives, 0.5) > kept


def test_of_the_experts_only_the_targets_change():
    trainer = trainer_of(replace(quick_config(data=LIGHT, steps=2), texts=12))
    model, path = trainer.context.model, trainer.context.paths[0]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.run()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    experts = [name for name in changed if ".experts." in name]
    assert len(experts) == 2 * len(path)
    below = {name for name in changed if "layers.3." in name}
    assert below
    assert all("self_attn" in name for name in below)  # it carries the trigger to the first router
    assert not any(f"layers.{layer}." in name for name in changed for layer in range(3))
    for name in experts:
        layer = int(name.split("layers.")[1].split(".")[0])
        moved_E = (model.get_parameter(name) != before[name]).flatten(1).any(1)
        assert set(moved_E.nonzero().flatten().tolist()) == set(path[layer])
