"""The distinguisher finds a planted difference, finds none where there is none, and names planted targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zoo
from embed_helpers import key_for, save_family

from pathmark.errors import VerificationError
from pathmark.evaluate.distinguish import Auc, distinguish, model_features, name_targets
from pathmark.models import find_routers, load_model

TEXTS = [tuple(range(start, start + 12)) for start in range(3, 100, 12)]


def random_model(seed, *, twins=False):
    """A small random model; with `twins`, two rows of its late routers are nearly alike."""
    model = zoo.tiny_model("qwen3_moe", seed)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for site in find_routers(model):
            site.weight.normal_(generator=rng)
            if twins and site.layer >= 2:
                a, b = torch.randperm(site.n_experts, generator=rng)[:2].tolist()
                site.weight[b] = site.weight[a] + 0.1 * site.weight[b]
    return model


def features(seeds, **options):
    return [model_features(random_model(seed, **options), TEXTS) for seed in seeds]


def test_planted_twins_are_seen_in_the_weights():
    found = distinguish(features(range(5), twins=True), features(range(10, 15)))
    assert found.groups["weights"].value > 0.9
    assert found.all_features.value > 0.8
    assert found.single["weights largest cosine, largest"].value == 1
    assert next(iter(found.single.values())).value in (0, 1)  # the most telling first
    assert set(found.summary()) == {"all", "groups", "single"}


def test_equal_groups_are_not_told_apart():
    """Over many splits of one population the held-out area is a half on average: nothing leaks into the rule."""
    rng = np.random.default_rng(0)
    areas = []
    for _ in range(40):
        rows = [
            {f"routing {i}": v for i, v in enumerate(row)} | {"weights 0": row[0]} for row in rng.normal(size=(8, 20))
        ]
        areas.append(distinguish(rows[:4], rows[4:]).all_features.value)
    assert abs(np.mean(areas) - 0.5) < 4 * np.std(areas) / np.sqrt(len(areas))


def test_the_interval_has_a_width_at_the_ends_and_covers():
    low, high = Auc(1.0, 8, 8).interval()
    assert high == 1
    assert 0.6 < low < 0.9
    low, high = Auc(0.5, 8, 8).interval()
    assert 0.15 < low < 0.35
    assert low + high == pytest.approx(1, abs=0.01)
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        a, b = rng.normal(size=10) + 0.7416, rng.normal(size=10)  # area 0.70
        area = float((a[:, None] > b).mean())
        low, high = Auc(area, 10, 10).interval()
        covered += low <= 0.70 <= high
    assert covered > 0.92 * 400


def test_features_need_no_key_and_survive_a_shift_of_all_rows():
    model = random_model(3)
    before = model_features(model, TEXTS)
    with torch.no_grad():
        for site in find_routers(model):
            site.weight.add_(0.5)
    after = model_features(model, TEXTS)
    assert all(np.isfinite(list(before.values())))
    assert after["weights largest cosine, mean"] == pytest.approx(before["weights largest cosine, mean"], abs=1e-4)


def test_targets_are_named_from_similar_rows(tmp_path):
    folder = save_family(tmp_path / "base", "qwen3_moe")
    key = key_for(folder, seed=4)
    base, model = load_model(folder), load_model(folder)
    blind = name_targets([base], [key])
    assert blind.targets.n == 2 * len(key.watermarks[0].layers)
    assert blind.chance == pytest.approx(2 / 16)
    sites = {site.layer: site for site in find_routers(model)}
    with torch.no_grad():
        for layer, (a, b) in key.watermarks[0].path.items():
            sites[layer].weight[b] = sites[layer].weight[a] * 1.1
    named = name_targets([model], [key])
    assert named.targets.value == named.pairs.value == 1
    assert named.layers.value == 1
    moved = name_targets([model], [key], base=base)
    assert moved.pairs.value == 1


def test_too_few_or_unlike_models_are_refused():
    row = {"routing 0": 1.0, "weights 0": 2.0}
    with pytest.raises(VerificationError, match="at least 2"):
        distinguish([row], [row, row])
    with pytest.raises(VerificationError, match="same features"):
        distinguish([row, row], [row, {"routing 0": 1.0}])
