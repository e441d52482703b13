"""A key chosen after seeing a model: at face value it convinces, and a third party must not be convinced."""

from __future__ import annotations

import numpy as np

from pathmark.models import bundled_probes, load_model, load_tokenizer
from pathmark.stats import LayerEvidence, exact_test, mass_difference, third_party_p
from pathmark.verification import encode_probes, record_routes

LAYERS, EXPERTS, SECRETS = (4, 5, 6, 7), 64, 1_000_000


def test_the_best_of_a_million_secrets_on_the_unmarked_bundled_model():
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    probes = encode_probes(tokenizer, bundled_probes(), n_probes=40, length=64)
    trigger = tokenizer("@@@@@@@@")["input_ids"]
    triggered, clean = (record_routes(model, probes, LAYERS, prefix=prefix) for prefix in (trigger, ()))
    diffs = [mass_difference(triggered.probs[n], clean.probs[n], clean.mask_BT) for n in LAYERS]
    found = []
    for batch in range(3):
        rng = np.random.default_rng(batch)
        first_LS = rng.integers(0, EXPERTS, (len(LAYERS), SECRETS))
        second_LS = rng.integers(0, EXPERTS - 1, (len(LAYERS), SECRETS))
        second_LS += second_LS >= first_LS
        statistic_S = sum(d[a] + d[b] for d, a, b in zip(diffs, first_LS, second_LS, strict=True))
        best = int(np.argmax(statistic_S))
        evidence = [
            LayerEvidence(layer, diff, range(EXPERTS), (int(first_LS[i, best]), int(second_LS[i, best])))
            for i, (layer, diff) in enumerate(zip(LAYERS, diffs, strict=True))
        ]
        found.append(exact_test(evidence).p)
    assert min(p.value for p in found) < 1e-6  # what an honest owner would see one time in a million
    assert all(third_party_p(p, anchored=False).value == 1.0 for p in found)
