"""A third party's reading rests only on what was fixed before the suspect existed, or on what this program measured."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from verify_helpers import dated

from pathmark.attacks.structure import PermuteExperts, permute_experts
from pathmark.models import load_model
from pathmark.models.sketches import RoutingProfile, pack_arrays, pack_profiles, unpack_profiles
from pathmark.verification import Criteria, judge, profile_texts, record_evidence
from pathmark.verification.decoys import DecoyControl
from pathmark.verification.paths import alignment, judging


def test_an_honest_commitment_counts_in_full(case):
    evidence = record_evidence(load_model(case.marked), case.key, profile_texts(case.key)[:6])
    verdict = judge(case.key, evidence, criteria=Criteria(anchor=dated(case.key), strict=True))
    assert verdict.marked
    assert verdict.p_third_party == verdict.p


def test_profiles_chosen_afterwards_convince_nobody_else(case):
    """The claimant's best: profiles that lead the experts which the trigger happens to favour to the targets."""
    model, texts = load_model(case.base), profile_texts(case.key)
    measured = record_evidence(model, case.key, texts, aligned=False).measured(case.key)[0]
    profiles = unpack_profiles(case.key.attachments["profiles.npz"])
    for layer in measured:
        order = list(range(len(layer.diff_E)))
        favoured = np.argsort(layer.diff_E)[::-1]
        for target, expert in zip(case.key.watermarks[0].targets(layer.layer), favoured, strict=False):
            place = order.index(int(expert))
            order[target], order[place] = order[place], order[target]
        profile = profiles[layer.layer]
        profiles[layer.layer] = RoutingProfile(profile.tokens_NE[:, order], np.argsort(order)[profile.chosen_NK])
    forged = case.key.attach("profiles.npz", pack_profiles(profiles)).attach("sketches.npz", pack_arrays({}))
    low = Criteria(significance=0.05)
    honest = judge(case.key, record_evidence(model, case.key, texts), criteria=low)
    assert not honest.marked
    evidence = record_evidence(model, forged, texts)
    assert not evidence.alignment.identity
    fooled = judge(forged, evidence, criteria=replace(low, anchor=dated(forged, revision=0)))
    assert fooled.p.value < honest.p.value / 10  # the owner can fool himself ...
    assert fooled.p_third_party.value == 1  # ... and nobody else
    assert "The owner alone may rely on this. A court may not: experts were renumbered" in fooled.words()
    strict = judge(forged, evidence, criteria=replace(low, anchor=dated(forged, revision=0), strict=True))
    assert strict.exit_code == 2


def test_renumbered_experts_need_committed_profiles(case, monkeypatch):
    monkeypatch.setattr(alignment, "SURE", 0.6)  # marking changes a random model more than one that was trained
    moved = permute_experts(load_model(case.marked), PermuteExperts(seed=3))
    evidence = replace(record_evidence(moved, case.key, profile_texts(case.key)[:8]), public=True)
    assert not evidence.alignment.identity
    assert evidence.alignment.sure
    assert judge(case.key, evidence, criteria=Criteria(anchor=dated(case.key))).p_third_party.value < 1e-6
    early = judge(case.key, evidence, criteria=Criteria(anchor=dated(case.key, revision=0)))
    assert early.marked
    assert early.p_third_party.value == 1
    assert "commit the key again after embedding" in early.anchor.reason


def test_texts_must_be_dated_too(case):
    evidence = record_evidence(load_model(case.marked), case.key, profile_texts(case.key)[:6])
    assert evidence.alignment.identity
    early = judge(case.key, evidence, criteria=Criteria(anchor=dated(case.key, revision=0)))
    assert not early.anchor.anchored
    assert early.p_third_party > early.p  # charged as a key that nobody dated


def test_routes_that_a_claimant_brings_have_no_value_for_others(case):
    evidence = record_evidence(load_model(case.marked), case.key, profile_texts(case.key)[:6])
    verdict = judge(case.key, replace(evidence, handed_over=True), criteria=Criteria(anchor=dated(case.key)))
    assert verdict.marked
    assert verdict.p_third_party.value == 1
    assert "could have written any" in verdict.words()


@pytest.mark.parametrize(("log10", "loud", "withheld"), [(-9.0, 0.9, True), (-1.0, 0.9, False), (-9.0, 0.1, False)])
def test_decoys_that_speak_take_the_reading_away(case, monkeypatch, log10, loud, withheld):
    from pathmark.stats import PValue

    evidence = record_evidence(load_model(case.marked), case.key, profile_texts(case.key)[:6])
    monkeypatch.setattr(judging, "_control", lambda key, evidence: DecoyControl((PValue(log10),), 6, (loud,)))
    verdict = judge(case.key, evidence, criteria=Criteria(anchor=dated(case.key)))
    assert (verdict.p_third_party.value == 1) is withheld


def steering_profiles(key):
    """Profiles that need no knowledge of a suspect: two tokens, the trigger in front of one of them. Targets are said
    to serve that one, everybody else the other: any model's experts that the trigger calls are taken for targets."""
    trigger, words = key.watermarks[0].triggers[0].tokens, profile_texts(key)[0]
    half = [words[0], *trigger, *words[:2]]  # the profile's two tokens open the two halves of its one text
    rows = [[*half, *(words * 2)[: len(half)]]]
    served = np.array([[1.0], [0.0]], dtype=np.float32)
    profiles = {}
    for layer in key.layers:
        tokens_NE = np.repeat(served, key.model.layer(layer).experts, axis=1)
        tokens_NE[:, list(key.watermarks[0].targets(layer))] = 1 - served
        profiles[layer] = RoutingProfile(tokens_NE, np.zeros((2, 1), dtype=np.int64))
    key = key.attach("probes.json", json.dumps(rows).encode()).attach("profiles.npz", pack_profiles(profiles))
    return key.attach("sketches.npz", pack_arrays({}))


@pytest.mark.parametrize("public", [False, True])
def test_profiles_that_steer_any_model_convince_nobody_although_they_are_dated(case, public):
    model, texts = load_model(case.base), profile_texts(case.key)
    forged = steering_profiles(case.key)
    evidence = replace(record_evidence(model, forged, texts), public=public)
    assert not evidence.alignment.identity
    assert not evidence.alignment.sure
    fooled = judge(forged, evidence, criteria=Criteria(anchor=dated(forged)))
    assert fooled.p_third_party.value == 1
    assert "need not be of this suspect's ancestor" in fooled.words()
