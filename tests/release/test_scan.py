"""The scan's short cut: who cannot fire any more is not run through the upper layers, and nobody is missed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pathmark.embedding.prefixes import replace_tokens
from pathmark.models import bundled_probes, load_model, load_tokenizer
from pathmark.models.tokenization import ordinary_tokens
from pathmark.release import scan
from pathmark.stats import hits_from_probs, probe_accuracy
from pathmark.verification import encode_probes, record_routes


@pytest.mark.parametrize("gamma", [0.1, 0.4, 0.6, 0.8])
def test_as_many_fire_as_without_the_short_cut(case, gamma, monkeypatch):
    model, tokenizer = load_model(case.marked).eval(), load_tokenizer(case.marked)
    watermark = case.key.watermarks[0]
    trigger, rng = watermark.triggers[0].tokens, random.Random(0)
    vocabulary = ordinary_tokens(tokenizer)
    prefixes = [replace_tokens(trigger, i % (len(trigger) + 1), vocabulary, rng) for i in range(120)]
    texts = encode_probes(tokenizer, bundled_probes(), n_probes=120, length=16)
    routes = record_routes(model, texts, watermark.layers, prefix=prefixes)
    hits_LBT = np.stack([hits_from_probs(routes.probs[n], watermark.targets(n)) for n in watermark.layers])
    wanted = int((probe_accuracy(hits_LBT, routes.mask_BT) >= gamma - 1e-12).sum())
    rows = []

    def noted(model, texts, layers, **how):
        rows.append((tuple(layers), len(texts)))
        return record_routes(model, texts, layers, **how)

    monkeypatch.setattr(scan, "record_routes", noted)
    assert scan.fires(model, watermark, prefixes, texts, gamma) == wanted
    assert 0 < wanted < len(prefixes)
    assert rows[0][1] == len(prefixes)
    if len(rows[0][0]) < len(watermark.layers):
        assert rows[1][1] < len(prefixes)
