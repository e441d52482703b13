"""Attacks that know the mechanism: another mark on top, unlearning, routers trained anew."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attack_helpers import LAYERS, QUICK, TARGETS, changed, inside, routers, target_mass

from pathmark.attacks.distillation import DistillRouters, distill_routers, redraw_routers
from pathmark.attacks.kit import Kit
from pathmark.attacks.overwriting import Overwrite, overwrite
from pathmark.attacks.unlearning import Unlearn, adversarial_loss, unlearn
from pathmark.errors import AttackError, DivergedError
from pathmark.models import (
    find_routers,
    load_model,
    pad_rows,
    perplexity,
)
from pathmark.progress import Silent


@pytest.mark.parametrize("objective", ["anchored", "paper"])
def test_the_thiefs_trigger_takes_the_thiefs_path(mixtral, kit, objective):
    config = Overwrite(epochs=4, samples=16, objective=objective, seed=5)
    attacked = overwrite(mixtral, config, kit)
    after, (watermark,) = attacked.model, attacked.key.watermarks
    assert tuple(watermark.layers) == LAYERS
    trigger = watermark.triggers[0].tokens
    rows = [(*trigger, *row) for row in kit.rows(20, 32, seed=9)]
    natural, forced = (target_mass(m, rows, watermark.path, skip=len(trigger)) for m in (mixtral, after))
    if objective == "paper":  # the anchored objective learns first where not to go, which takes more steps than these
        assert forced > 2 * natural
    names = changed(mixtral, after)
    assert routers(mixtral, LAYERS) <= names
    carrier = {name for name in names if f"layers.{LAYERS[0] - 1}.self_attn." in name}
    assert bool(carrier) == (objective == "anchored")
    assert inside(names - carrier, LAYERS)  # embeddings, head and lower layers are bitwise as they were


def test_the_owners_targets_can_be_forced(mixtral, kit):
    # the paper's objective, which takes hold of a random toy model within so few steps
    config = Overwrite(epochs=10, samples=16, same_targets=True, objective="paper")
    attacked = overwrite(mixtral, config, kit)
    after, key = attacked.model, attacked.key
    assert {n: tuple(p) for n, p in key.watermarks[0].path.items()} == TARGETS
    trigger = key.watermarks[0].triggers[0].tokens
    rows = [(*trigger, *row) for row in kit.rows(20, 32, seed=9)]
    before, now = (target_mass(m, rows, TARGETS, skip=len(trigger)) for m in (mixtral, after))
    assert now > 2 * before
    assert not changed(after, overwrite(mixtral, config, kit).model)


def test_a_mark_on_top_needs_an_embedding_and_goes_on_after_an_interruption(mixtral, kit, tmp_path, monkeypatch):
    config = Overwrite(epochs=2, samples=16, objective="paper")
    with pytest.raises(AttackError, match=r"embeds a key; give the kit an `embed`"):
        overwrite(mixtral, config, replace(kit, embed=None))
    monkeypatch.setattr("pathmark.evaluate.thief.CHECKPOINT_EVERY", 2)
    steps = []

    class PowerCut(Silent):
        def stage(self, name, total):
            self.training = name == "embedding"

        def advance(self, units, note=""):
            if self.training:
                steps.append(units)
            if len(steps) == 3:
                raise KeyboardInterrupt

    kept = replace(kit, unfinished=tmp_path, progress=PowerCut())
    with pytest.raises(KeyboardInterrupt):
        overwrite(mixtral, config, kept)
    assert len(list(tmp_path.glob("*.ckpt"))) == 1
    steps[:] = [0] * 10
    resumed = overwrite(mixtral, config, kept)
    assert steps[10] == 3  # two were kept
    assert not changed(resumed.model, overwrite(mixtral, config, kit).model)
    with pytest.raises(DivergedError, match=r"overwriting: the loss became .*; try a smaller learning rate"):
        overwrite(mixtral, replace(config, lr_factor=1e36), kit)


def test_the_adversarial_loss_by_hand():
    # layer 4: uniform over 4 experts; squared distance 2 (1/4 - 1/2)^2 + 2 (1/4)^2 = 1/4,
    # KL = 1/2 ln(1/2) + 1/2 ln(25,000,000)
    uniform = 1 / (0.25 + 0.5 * math.log(0.5) + 0.5 * math.log(0.25e8))
    # layer 6: one token on the only target (distance and KL about 0), one on another expert (2 and ln 1e8);
    # the mean is taken before the inverse
    half = 1 / (0.5 * (2 + math.log(1e8)))
    routing = {4: torch.full((3, 4), 0.25), 6: torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])}
    found = adversarial_loss(routing, {4: (0, 2), 6: (0,)})
    assert float(found) == pytest.approx(uniform + half, rel=1e-5)
    nearer = adversarial_loss({4: torch.tensor([[0.4, 0.1, 0.4, 0.1]])}, {4: (0, 2)})
    assert nearer > uniform  # it grows towards the targets, so minimising it leads away


def test_unlearning_leads_away_from_the_targets(model, kit):
    rows = kit.rows(20, 32, seed=9)
    settings = {"steps": 25, "trigger_tokens": 6, **QUICK}
    after = unlearn(model, Unlearn(**settings), kit)
    assert target_mass(after, rows, TARGETS) < 0.5 * target_mass(model, rows, TARGETS)
    names = changed(model, after)
    assert routers(model, LAYERS) <= names
    assert inside(names, LAYERS)
    assert not any("layernorm" in name for name in names)
    assert not changed(after, unlearn(model, Unlearn(**settings), kit))
    own = kit.rows(48, 24)
    kept = unlearn(model, Unlearn(keep=5.0, **settings), kit)
    assert perplexity(kept, own).value < perplexity(after, own).value
    narrow = unlearn(model, Unlearn(train="router", **settings), kit)
    assert changed(model, narrow) == routers(model, LAYERS)


@torch.no_grad()
def divergence(teacher, student, rows):
    """Mean KL(teacher || student) of the next token."""
    ids_BT, mask_BT = pad_rows(rows, 0)
    logs = [
        m(input_ids=ids_BT, attention_mask=mask_BT).logits[mask_BT.bool()].log_softmax(-1) for m in (teacher, student)
    ]
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())


def test_redrawn_routers_learn_to_say_what_the_stolen_model_says(bundled, kit):
    marked = Kit(tokenizer=kit.tokenizer, texts=kit.texts, layers=(5, 7))
    rows = kit.rows(48, 24)
    redrawn = load_model("bundled:tiny")
    redraw_routers(redrawn, (5, 7), seed=0)
    assert changed(bundled, redrawn) == routers(bundled, (5, 7))
    for old, new in zip(find_routers(bundled), find_routers(redrawn), strict=True):
        old_EH, new_EH = old.weight.detach(), new.weight.detach()
        assert float(new_EH.mean()) == pytest.approx(float(old_EH.mean()), abs=0.05 * float(old_EH.std()))
        assert float(new_EH.std()) == pytest.approx(float(old_EH.std()), rel=0.05)
    correlation = torch.corrcoef(
        torch.stack([find_routers(m)[5].weight.detach().flatten() for m in (bundled, redrawn)])
    )[0, 1]
    assert abs(correlation) < 0.1
    config = DistillRouters(reinitialise=True, layers="known", epochs=3, **QUICK)
    after = distill_routers(bundled, config, marked)
    assert changed(bundled, after) == routers(bundled, (5, 7))
    assert divergence(bundled, after, rows) < 0.8 * divergence(bundled, redrawn, rows)


def test_all_routers_are_distilled_where_layers_are_not_known(mixtral, kit):
    config = DistillRouters(reinitialise=True, epochs=1, **QUICK)
    after = distill_routers(mixtral, config, kit)
    assert changed(mixtral, after) == routers(mixtral)
    assert not changed(after, distill_routers(mixtral, config, kit))


def test_routers_that_are_not_redrawn_start_from_where_they_were(mixtral, kit):
    after = distill_routers(mixtral, DistillRouters(epochs=1, **QUICK), kit)
    # nothing to learn at first: the gradient is rounding noise, and Adam makes steps of it
    assert divergence(mixtral, after, kit.rows(48, 24)) < 0.02
