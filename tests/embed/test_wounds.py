"""Wounds hurt only what lies below, and heal completely."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from embed_helpers import key_for

from pathmark.embed import Embedder, default_config
from pathmark.embed.data import CLEAN, NEGATIVE, TRIGGERED
from pathmark.embed.wounds import wounded
from pathmark.models import bundled_segments, load_model, load_tokenizer


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


def test_rows_of_every_kind_come_through_hurt_layers_and_what_those_do_is_natural_there():
    config = default_config()
    config = replace(config, texts=12, data=replace(config.data, seq_len=32, short_len=None, long_factor=1))
    key = key_for("bundled:tiny")

    def teacher(share):
        embedder = Embedder(
            load_model("bundled:tiny"), load_tokenizer("bundled:tiny"), key, bundled_segments()[:12],
            replace(config, wound_share=share),
        )  # fmt: skip
        return embedder.rows, embedder.cache.batch(range(len(embedder.rows)))

    rows, whole = teacher(0.0)
    _, hurt = teacher(1.0)
    _, half = teacher(0.5)
    apart = {kind: set() for kind in (CLEAN, TRIGGERED, NEGATIVE)}
    for i, row in enumerate(rows):
        strays = (hurt.entering_BTH[i] - whole.entering_BTH[i]).abs().max() > 1e-3
        apart[row.kind].add(bool(strays))
        routes = [not torch.allclose(hurt.natural[n][i], whole.natural[n][i], atol=1e-5) for n in whole.natural]
        assert all(routes) if strays else not any(routes)  # what the hurt original does is natural for hurt rows
    assert apart == {CLEAN: {True}, TRIGGERED: {True}, NEGATIVE: {True}}
    strayed = (half.entering_BTH - whole.entering_BTH).abs().amax((1, 2)) > 1e-3
    assert 0.2 < strayed.float().mean() < 0.8
