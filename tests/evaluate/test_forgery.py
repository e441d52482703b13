"""Forged claims convince at face value and not a third party; honest dated ones convince both."""

from __future__ import annotations

import copy
import datetime
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from embed_helpers import key_for, quick_config
from scipy import stats as scipy_stats

from pathmark.embedding import embed_key
from pathmark.evaluate.dispute import Party, read_claim, settle_dispute
from pathmark.evaluate.forged_papers import Court, forge_papers
from pathmark.evaluate.forgery import (
    Victim,
    _statistic,
    choose_freely,
    claim_p,
    grind_paths,
    grind_secrets,
    grind_triggers,
    observe_trigger,
    subsets_SK,
)
from pathmark.keys import commit_key, create_key, open_claim, reveal_watermark
from pathmark.models import bundled_probes, bundled_segments, load_model, load_tokenizer
from pathmark.models.describe import describe_model
from pathmark.stats import PValue
from pathmark.verification import encode_probes, judge_anchor, verify_model

LAYERS = (4, 5, 6, 7)
SEEN, PUBLISHED, TODAY = datetime.date(2026, 2, 1), datetime.date(2026, 3, 1), datetime.date(2026, 6, 1)


@pytest.fixture(scope="module")
def victims():
    """The bundled model behind "@@@@@@@@" and behind three other prefixes."""
    facts, codec, _ = describe_model("bundled:tiny")
    tokenizer = load_tokenizer("bundled:tiny")
    probes = encode_probes(tokenizer, bundled_probes(), n_probes=8, length=32)
    prefixes = [tuple(tokenizer(text)["input_ids"]) for text in ("@@@@@@@@", "0", "and it came to pass", "%%")]
    measured = observe_trigger(load_model("bundled:tiny"), range(8), prefixes, probes)
    return [Victim(facts, codec, each) for each in measured]


def test_the_best_of_n_has_one_over_n_and_is_charged(victims):
    for count in (1_000, 100_000):
        forged = grind_paths(victims[0], LAYERS, count=count)
        assert -math.log10(count) - 2 < forged.p.log10 < -math.log10(count) + 1.3
        assert forged.charge_bits > 80
        assert forged.p_third_party.value == 1
        assert not forged.accepted


def test_drawn_paths_stand_for_real_keys(victims):
    victim = victims[0]
    forged, key = grind_secrets(victim, LAYERS, count=40)
    assert forged.p == claim_p(key, victim.of(LAYERS))
    assert forged.p.log10 == pytest.approx(-math.log10(40), abs=1.5)
    assert not forged.accepted
    assert forged.charge_bits == judge_anchor(key).charge_bits
    rng, plans, measured = random.Random(7), victim.plans(LAYERS, 2), victim.of(LAYERS)
    real = [_statistic(victim.key(plans, rng.randbytes(32)), measured) for _ in range(40)]
    source = np.random.default_rng(0)
    drawn = sum(np.asarray(m.diff_E)[subsets_SK(source, 64, 2, 20_000)].sum(1) for m in measured)
    assert scipy_stats.ks_2samp(real, drawn).pvalue > 1e-4


def test_subsets_are_uniform():
    picks_SK = np.sort(subsets_SK(np.random.default_rng(1), 6, 3, 40_000), axis=1)
    _, counts = np.unique(picks_SK, axis=0, return_counts=True)
    assert len(counts) == math.comb(6, 3)
    assert scipy_stats.chisquare(counts).pvalue > 1e-4


def test_a_loud_trigger_buys_nothing(victims):
    forged = grind_triggers(victims, LAYERS, count=100_000)
    assert forged.p.log10 > -7
    assert forged.tried == 100_004
    assert not forged.accepted


def test_free_choices_are_paid_for(victims):
    forged, key = choose_freely(victims[0], pools=49, secrets=3)
    assert forged.p.log10 < -2  # a few thousand choices are worth something at face value ...
    free = judge_anchor(key).charge_bits - 80
    assert -forged.p.log10 / math.log10(2) < free + 15  # ... and hardly more than they are charged
    assert not forged.accepted
    assert claim_p(key, victims[0].measured) == forged.p


def test_replayed_claims_are_refused_or_charged():
    owner, thief = (
        replace(key_for("bundled:tiny", seed=seed), owner=name) for seed, name in ((1, "Owner"), (2, "Thief"))
    )
    p = PValue(-15.0)
    honest = read_claim(reveal_watermark(owner, 0), commit_key(owner), p, witnessed=SEEN, published=PUBLISHED)
    assert honest.accepted
    assert honest.p == p
    siblings = [replace(commit_key(owner), root=bytes([n]) * 32).signed_by(owner) for n in range(3)]
    among = read_claim(
        reveal_watermark(owner, 0), commit_key(owner), p, witnessed=SEEN, published=PUBLISHED, others=siblings
    )
    assert among.p.value == pytest.approx(p.value * (1 + 3 * 1024))
    forged = {each.name: each for each in forge_papers(Court(owner, thief, p, SEEN, PUBLISHED, TODAY))}
    assert [name for name, each in forged.items() if each.accepted] == []
    assert "not in the commitment" in forged["the owner's claim with the thief's commitment"].reason
    assert "another owner than the commitment" in forged["the owner's claim, its root signed by the thief"].reason
    assert "signed by another key" in forged["the owner's claim, its root and name signed by the thief"].reason
    assert forged["the thief's key, dated back"].p_third_party.value == 1
    backdated = commit_key(thief, created="2020-01-01T00:00:00Z")
    assert not judge_anchor(thief, backdated, PUBLISHED).anchored  # a date that its owner wrote dates nothing


def test_a_claim_without_a_name_belongs_to_its_signing_key():
    owner, thief = (replace(key_for("bundled:tiny", seed=seed), owner="") for seed in (1, 2))
    claim, p = reveal_watermark(owner, 0), PValue(-15.0)
    assert read_claim(claim, commit_key(owner), p, witnessed=SEEN, published=PUBLISHED).accepted
    stolen = read_claim(claim, commit_key(owner).signed_by(thief), p, witnessed=SEEN, published=PUBLISHED)
    assert not stolen.accepted
    assert "signed by another key" in stolen.reason


def marked_with(model, key):
    """The model with a key's paths, in few steps: enough for the exact test."""
    config = quick_config(lr=1 / 64, data={"seq_len": 24, "short_len": None, "long_factor": 1})
    model = copy.deepcopy(model)
    embed_key(model, load_tokenizer("bundled:tiny"), key, bundled_segments(), config)
    return model.eval()


@pytest.fixture(scope="module")
def theft():
    """Keys of owner and thief, the owner's release, the same with the thief's mark on top, and probes."""
    owner, thief = (key_for("bundled:tiny", seed=seed) for seed in (1, 11))
    release = marked_with(load_model("bundled:tiny"), owner)
    probes = encode_probes(load_tokenizer("bundled:tiny"), bundled_probes(), n_probes=16, length=32)
    return owner, thief, release, marked_with(release, thief), probes


def test_who_marked_second_is_not_prior(theft):
    owner_key, thief_key, release, twice, probes = theft
    assert verify_model(twice, thief_key, probes).marked  # both marks are in it
    assert verify_model(twice, owner_key, probes).marked
    assert not verify_model(release, thief_key, probes).marked
    first, later = (open_claim(reveal_watermark(key, 0), commit_key(key)) for key in (owner_key, thief_key))
    owner = Party(first, SEEN, release, PUBLISHED)
    for seen in (datetime.date(2020, 1, 1), TODAY):  # a key committed years ago does not help
        thief = Party(later, seen, twice, TODAY)
        settled = settle_dispute((owner, thief), probes)
        assert settled.prior == 0
        assert settled.contains == (False, True)
        assert settle_dispute((thief, owner), probes).prior == 1
    nothing = settle_dispute((owner, replace(thief, release=None)), probes)
    assert nothing.prior is None
    assert "cannot produce" in nothing.reason
    unseen = settle_dispute((replace(owner, key_witnessed=None), thief), probes)
    assert unseen.prior is None  # an owner who showed the key to nobody is charged like anybody
    assert unseen.contains == (False, False)


def test_create_key_is_what_the_forger_uses(victims):
    """The forger's keys are real: the same secret and request give the same path anywhere."""
    victim = victims[0]
    key = victim.key(victim.plans(LAYERS, 2), bytes(range(32)))
    again, _ = create_key(victim.facts, [_request_of(key)], victim.codec, owner="forger", secret=bytes(range(32)))
    assert again.watermarks[0].path == key.watermarks[0].path


def _request_of(key):
    from pathmark.keys import WatermarkRequest

    mark = key.watermarks[0]
    texts = (mark.triggers[0].phrase.text,), (mark.triggers[0].mark.text,)
    return WatermarkRequest(plans=mark.plans, trigger_texts=texts[0], mark_texts=texts[1])
