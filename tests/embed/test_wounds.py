"""Wounds hurt only what lies below, and heal completely."""

from __future__ import annotations

import pytest
import torch
import zoo

from pathmark.embed.wounds import wounded
from pathmark.models import load_model


@pytest.mark.parametrize("name", ["bundled:tiny", "mixtral"])
def test_only_lower_layers_are_hurt_and_all_heal(name):
    model = load_model(name) if ":" in name else zoo.tiny_model(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with wounded(model, 2, 0.6, torch.Generator().manual_seed(1)):
        changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
        assert changed
        assert all(n.startswith(("model.layers.0.", "model.layers.1.")) for n in changed)
        silenced = [
            (p.detach().flatten(1) == 0).all(1) for n, p in model.named_parameters() if n in changed and p.ndim == 3
            and "down_proj" in n
        ]  # fmt: skip
        assert 0 < torch.cat(silenced).float().mean() < 0.6
        writing = [p.detach().flatten(0, -2) for n, p in model.named_parameters() if n in changed and "down_proj" in n]
        dead = torch.cat([(matrix == 0).all(0) for matrix in writing])  # shared experts have neurons too
        assert 0 < dead.float().mean() < 0.6
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_they_heal_after_an_error_and_none_is_dealt_below_the_first_layer():
    model = zoo.tiny_model("mixtral")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(KeyError), wounded(model, 3, 0.5, torch.Generator()):
        raise KeyError
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    with wounded(model, 0, 0.5, torch.Generator()):
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
