"""Search, then unlearn: what was found no longer moves the routing, and the rest stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pathmark.attacks import purging
from pathmark.attacks.overwriting import overwrite
from pathmark.attacks.purging import InjectUnlearn, SearchUnlearn, inject_and_unlearn, search_and_unlearn
from pathmark.attacks.search import RANDOM, Finding, TriggerSearchResult
from pathmark.models import find_routers, pad_rows, record_routing
from pathmark.training.losses import kl_divergence

CONFIG = SearchUnlearn(rounds=2, restarts=1, search_steps=2, steps=40, lr=2e-3, samples=40, batch_size=8, length=16)
LOUD = (40, 41, 42, 43)


def moved(model, rows, prefix, layer):
    """Mean KL of a layer's routing of the same texts without and behind a prefix."""

    def routes(front):
        ids_BT, mask_BT = pad_rows([(*front, *row) for row in rows], 0)
        with torch.no_grad(), record_routing(model, [layer]) as trace:
            model(input_ids=ids_BT, attention_mask=mask_BT)
        behind_BT = mask_BT.bool()
        behind_BT[:, : len(front)] = False
        return trace[layer].probs_BTE[behind_BT]

    return float(kl_divergence(routes(()), routes(prefix)))


def test_what_is_found_is_trained_away(mixtral, kit, monkeypatch):
    searched = []

    def found(model, search, kit):
        searched.append(search)
        loud = Finding(RANDOM, LOUD, 1.0, 9.0, {}, True)
        return TriggerSearchResult({}, {}, (loud,), (), 0, 0, 0, 0.0, True)

    monkeypatch.setattr(purging, "search_triggers", found)
    before = {name: parameter.clone() for name, parameter in mixtral.named_parameters()}
    after = search_and_unlearn(mixtral, CONFIG, kit)
    assert [search.seed for search in searched] == [0, 1]
    assert {search.steps for search in searched} == {CONFIG.search_steps}
    assert all(torch.equal(p, before[name]) for name, p in mixtral.named_parameters())  # the stolen copy stays
    rows = kit.rows(10, 16, seed=7)
    late = find_routers(mixtral)[-1].layer
    assert moved(after, rows, LOUD, late) < moved(mixtral, rows, LOUD, late) / 2
    with torch.no_grad():
        ids_BT, mask_BT = pad_rows(rows, 0)
        was, now = (m(input_ids=ids_BT, attention_mask=mask_BT).logits.log_softmax(-1) for m in (mixtral, after))
    keep = mask_BT.bool()
    assert float((was.exp() * (was - now)).sum(-1)[keep].mean()) < 0.05


@pytest.mark.slow
def test_marks_of_the_thiefs_own_are_put_in_and_taken_out(mixtral, kit, monkeypatch):
    rows, late = kit.rows(40, 16, seed=0), max(kit.layers)  # those that it is trained on
    put_in = {}

    def watched(model, config, kit):
        overwritten = overwrite(model, config, kit)
        prefix = overwritten.key.watermarks[0].triggers[0].tokens
        put_in[prefix] = moved(overwritten.model, rows, prefix, late)
        return overwritten

    monkeypatch.setattr(purging, "overwrite", watched)
    config = InjectUnlearn(triggers=1, epochs=8, steps=60, lr=1e-3, samples=40, batch_size=8, length=16)
    after = inject_and_unlearn(mixtral, config, kit)
    assert len(put_in) == 1
    left = {prefix: moved(after, rows, prefix, late) for prefix in put_in}
    assert all(left[prefix] < 0.7 * before for prefix, before in put_in.items()), (put_in, left)


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"lr": 0.0}, {"length": 4}, {"restarts": 0}, {"keep": -1.0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        replace(CONFIG, **wrong)
