"""The matcher finds what was renumbered, keeps what was not, and never sees a trigger or a target."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import embed_helpers
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from verify_helpers import Told

import pathmark.verification.weights.recording as recording
from pathmark.attacks.structure import (
    PermuteExperts,
    expert_order,
    permute_experts,
    permute_neurons,
    rescale_neurons,
    rotate_residual,
    shift_routers,
)
from pathmark.attacks.surgery import (
    DuplicateExperts,
    MergeExperts,
    RemoveExperts,
    drop_layers,
    duplicate_experts,
    merge_experts,
    remove_experts,
    similar_pairs,
)
from pathmark.errors import VerificationError
from pathmark.models import find_routers, load_model
from pathmark.models.sketches import expert_sketches, routing_profiles, token_places, unpack_profiles
from pathmark.stats import LayerMeasurement, exact_test, null_distribution
from pathmark.verification import Routes, attach_profiles, measure_layers, record_routes, verify_model
from pathmark.verification.paths.alignment import Alignment, LayerAlignment, align, layers_to_record, match
from pathmark.verification.paths.assignment import assign
from pathmark.verification.paths.decode import decode_id
from pathmark.verification.paths.similarity import LayerPrint
from pathmark.verification.weights.recording import count_rows, record_evidence

LAYERS = [2, 3]


@pytest.fixture(scope="module")
def owner(tmp_path_factory):
    """A small random qwen2_moe with lively routers, a key for its upper two layers, and probes."""
    folder = embed_helpers.save_family(tmp_path_factory.mktemp("original"), "qwen2_moe")
    model = load_model(folder)
    rng = np.random.default_rng(0)
    probes = [tuple(map(int, rng.integers(10, 4000, 48))) for _ in range(12)]
    key = attach_profiles(embed_helpers.key_for(folder, layers=LAYERS, number=5), model, probes)
    return model, key, probes


def aligned(model, key, probes):
    return record_evidence(model, key, probes).alignment


def truth(order):
    """stands_for of a permuted layer: new expert i was order[i]."""
    return tuple((int(e),) for e in order)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31), st.booleans())
def test_the_assignment_is_optimal(rows, columns, seed, coarse):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 3, (rows, columns)).astype(float) if coarse else rng.normal(size=(rows, columns))
    found = assign(values)
    paired = np.flatnonzero(found >= 0)
    assert len(paired) == min(rows, columns) == len(set(found[paired]))
    best = values[linear_sum_assignment(values, maximize=True)].sum()
    assert values[paired, found[paired]].sum() == pytest.approx(best)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m,
        shift_routers,
        lambda m: rescale_neurons(permute_neurons(m)),
        rotate_residual,
        lambda m: copy.deepcopy(m).bfloat16().float(),
    ],
    ids=["nothing", "shift", "neurons", "rotation", "bf16"],
)
def test_numbers_that_are_right_are_kept(owner, change):
    model, key, probes = owner
    found = aligned(change(model), key, probes)
    assert found.identity
    assert found.confidence > 0.2
    assert all(entry.matched_E.all() for entry in found.layers)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("also", [lambda m: m, rotate_residual, lambda m: rescale_neurons(shift_routers(m))])
def test_permuted_experts_are_found(owner, seed, also):
    model, key, probes = owner
    found = aligned(permute_experts(also(model), PermuteExperts(seed=seed)), key, probes)
    for entry in found.layers:
        assert entry.stands_for == truth(expert_order(seed, entry.layer, 16))
        assert entry.suspect_layer == entry.layer
    assert not found.identity


def test_two_swapped_experts_are_found(owner):
    model, key, probes = owner
    order = torch.arange(16)
    order[[3, 11]] = order[[11, 3]]
    suspect = permute_experts(model)
    back = {site.layer: site for site in find_routers(model)}
    for site in find_routers(suspect):  # everything back to where it was, but for two experts
        site.weight.data.copy_(back[site.layer].weight[order])
        for name in ("gate_up_proj", "down_proj"):
            getattr(site.experts, name).data.copy_(getattr(back[site.layer].experts, name)[order])
    found = aligned(suspect, key, probes)
    assert all(entry.stands_for == truth(order) for entry in found.layers)


def test_routes_are_put_into_the_owners_numbering(owner):
    model, key, probes = owner
    found = aligned(permute_experts(model), key, probes)
    expected = record_routes(model, probes, LAYERS)
    got = found.apply(record_routes(permute_experts(model), probes, LAYERS))
    for layer in LAYERS:
        assert np.allclose(got.probs[layer], expected.probs[layer], atol=1e-5)
        same = np.sort(got.decisions[layer], axis=2) == np.sort(expected.decisions[layer], axis=2)
        assert same.mean() > 0.999  # ties at the k-th place may fall either way


def test_decisions_alone_are_enough(owner):
    model, key, probes = owner
    routes = record_routes(permute_experts(model), probes, range(4))
    bare = Routes.from_decisions(routes.decisions, routes.mask_BT, 16)
    found = align(key, bare)
    for entry in found.layers:
        right = [a == b for a, b in zip(entry.stands_for, truth(expert_order(0, entry.layer, 16)), strict=True)]
        assert np.mean(right) == 1
        assert entry.parts == ("tokens",)
    again = found.apply(bare)
    assert not again.masses_known
    assert again.n_experts(2) == 16
    some = align(key, bare.part([4, 0, 7, 9]), rows=[4, 0, 7, 9])  # a third of the texts
    assert np.mean([a == b for a, b in zip(some[3].stands_for, found[3].stands_for, strict=True)]) > 0.8
    with pytest.raises(VerificationError, match="none of them"):
        align(key, bare.part([0]), rows=[99])


def test_removed_experts_are_missing_and_the_rest_is_found(owner):
    model, key, probes = owner
    gone = {n: [n, 7, 12] for n in range(4)}
    found = aligned(permute_experts(remove_experts(model, RemoveExperts(experts=gone))), key, probes)
    for entry in found.layers:
        lost = gone[entry.layer]
        kept = [e for e in range(16) if e not in lost]
        order = expert_order(0, entry.layer, 13)
        right = [owners[:1] == (kept[o],) for owners, o in zip(entry.stands_for, order.tolist(), strict=True)]
        assert all(right)
        assert int((~entry.matched_E).sum()) == 3
        assert not entry.matched_E[lost].any()


def test_copies_add_up(owner):
    model, key, probes = owner
    suspect = duplicate_experts(model, DuplicateExperts(count=4, seed=1))
    found = aligned(suspect, key, probes)
    for entry in found.layers:
        site = {site.layer: site for site in find_routers(suspect)}[entry.layer]
        for extra in range(16, 20):
            twin = int((site.weight[:16] == site.weight[extra]).all(1).nonzero())
            assert entry.stands_for[extra] == entry.stands_for[twin] == (twin,)
        assert entry.doubled == 4
    raw = record_routes(suspect, probes, [3])
    total = found.apply(record_routes(suspect, probes, LAYERS)).probs[3].sum(-1)
    assert np.allclose(total, raw.probs[3].sum(-1), atol=1e-5)


def test_a_merger_stands_for_both_parents(owner):
    model, key, probes = owner
    found = aligned(merge_experts(model, MergeExperts(share=0.26)), key, probes)  # two pairs of 16
    hits = 0
    for entry in found.layers:
        site = {site.layer: site for site in find_routers(model)}[entry.layer]
        pairs = {tuple(sorted(pair)) for pair in similar_pairs(site.weight, 2)}
        hits += len(pairs & set(entry.stands_for))
        assert {owners for owners in entry.stands_for if len(owners) > 1} <= pairs  # none invented
    assert hits >= 3
    routes = record_routes(merge_experts(model, MergeExperts(share=0.26)), probes, LAYERS)
    mapped = found.apply(routes)
    entry = next(entry for entry in found.layers if entry.merged)
    s, (first, second) = next((s, o) for s, o in enumerate(entry.stands_for) if len(o) > 1)
    assert np.allclose(mapped.probs[entry.layer][..., first], routes.probs[entry.layer][..., s])
    assert np.allclose(mapped.probs[entry.layer][..., second], routes.probs[entry.layer][..., s])
    chose = (routes.decisions[entry.layer] == s).any(-1)
    for parent in (first, second):
        assert ((mapped.decisions[entry.layer] == parent).any(-1) == chose).all()


@pytest.mark.parametrize(
    ("dropped", "expected"), [([0], {2: 1, 3: 2}), ([2], {2: None, 3: 2}), ([1, 3], {2: 1, 3: None})]
)
def test_dropped_layers(owner, dropped, expected):
    model, key, probes = owner
    found = aligned(permute_experts(drop_layers(model, dropped)), key, probes)
    assert {entry.layer: entry.suspect_layer for entry in found.layers} == expected
    for entry in found.layers:
        if entry.suspect_layer is not None:
            order = expert_order(0, entry.suspect_layer, 16)
            assert entry.stands_for == truth(order)


def test_an_unrelated_model_keeps_its_numbers_without_confidence(owner, tmp_path):
    _, key, probes = owner
    stranger = load_model(embed_helpers.save_family(tmp_path, "qwen2_moe", seed=77))
    found = aligned(stranger, key, probes)
    assert found.identity
    assert found.confidence == 0


def test_what_the_verdict_says(owner):
    model, key, probes = owner
    verdict = verify_model(permute_experts(drop_layers(model, [2])), key, probes[:3])
    shown = verdict.summary()
    json.dumps(shown)
    assert verdict.erased_layers == (2,)
    assert shown["alignment"]["layers"][0] | {"similarity": 0} == {
        "layer": 2, "suspect_layer": None, "matched": 0, "unmatched": 16, "merged": 0, "doubled": 0, "moved": 0,
        "similarity": 0, "confidence": 0.0, "parts": [],
    }  # fmt: skip
    assert "layers 2 have no counterpart" in verdict.words()
    assert not verdict.marked
    assert verdict.p_floor.value == pytest.approx(1 / 120)
    secret = key.secret.reveal().hex()
    assert secret not in json.dumps(shown)
    by_number = verify_model(model, key, probes[:3], align=False)
    assert by_number.alignment is None
    assert by_number.p_floor.value == pytest.approx(1 / 120**2)


def test_everything_runs_in_one_recording(owner, monkeypatch):
    model, key, probes = owner
    calls = []
    monkeypatch.setattr(recording, "record_routes", lambda *a, **k: calls.append(len(a[1])) or record_routes(*a, **k))
    told = Told()
    verdict = verify_model(model, key, probes[:2], progress=told)
    assert calls == [2 + 10 + 2]  # two probes, the ten other profile texts, two triggered
    assert told.stages == [("probes", 14)]
    assert told.done == count_rows(key, probes[:2]) == 14
    assert (verdict.n_probes, verdict.n_tokens) == (2, 96)
    trigger = key.watermarks[0].triggers[0].tokens
    evidence = record_evidence(model, key, probes[:2], decoys=[(5, 6, 7)], decoy_probes=1)
    recorded = [(evidence.clean, (), 2), (evidence.triggered[0], trigger, 2), (evidence.decoys[0], (5, 6, 7), 1)]
    for got, prefix, n in recorded:
        expected = record_routes(model, probes[:n], LAYERS, prefix=prefix)
        assert np.allclose(got.probs[3][:, :48], expected.probs[3], atol=1e-5)


def test_layers_that_are_looked_at(owner):
    _, key, _ = owner
    assert layers_to_record(key, range(4), 4) == [0, 1, 2, 3]
    assert layers_to_record(key, range(10), 10) == list(range(10))  # six put in: up to 3 + 6
    assert layers_to_record(key, range(3), 3) == [0, 1, 2]
    with pytest.raises(VerificationError, match="key marks"):
        layers_to_record(key, [40], 4)


def test_the_attachments_come_from_the_model_given_and_are_small(owner):
    model, key, probes = owner
    profiles = unpack_profiles(key.attachments["profiles.npz"])
    fresh = routing_profiles(model, probes, LAYERS)
    for layer in LAYERS:
        assert np.allclose(profiles[layer].tokens_NE, fresh[layer].tokens_NE, atol=1e-3)
        assert (profiles[layer].chosen_NK == fresh[layer].chosen_NK).all()
    assert sum(map(len, key.attachments.values())) < 200_000
    recorded = record_routes(model, probes, LAYERS)
    texts_N, positions_N = token_places([len(text) for text in probes], len(fresh[3].tokens_NE))
    assert np.allclose(fresh[3].tokens_NE, recorded.probs[3][texts_N, positions_N], atol=1e-5)


def test_sketches_survive_what_keeps_the_function(owner):
    model, _, _ = owner
    original = expert_sketches(model, LAYERS)
    hidden = expert_sketches(rescale_neurons(permute_neurons(shift_routers(model))), LAYERS)
    for name, array in original.items():
        assert np.allclose(array, hidden[name], atol=1e-3)
    rotated = expert_sketches(rotate_residual(model), LAYERS)
    assert np.allclose(original["neurons3"], rotated["neurons3"], atol=1e-3)
    assert not np.allclose(original["router3"], rotated["router3"], atol=1e-2)


def test_a_key_without_profiles_is_taken_by_its_numbers(owner):
    model, key, probes = owner
    bare = replace(key, attachments={}, history=())
    assert verify_model(model, bare, probes[:2]).alignment is None


def layer_print(rng, experts, tokens=200):
    return LayerPrint(rng.dirichlet(np.full(experts, 0.2), tokens).astype(np.float32))


def test_a_noisy_copy_keeps_its_numbers():
    rng = np.random.default_rng(3)
    original = layer_print(rng, 24)
    noisy = LayerPrint(np.clip(original.tokens_NE + rng.normal(0, 0.1, (200, 24)), 0, 1))
    assert match({5: original}, {5: noisy}).identity
    order = rng.permutation(24)
    found = match({5: original}, {5: LayerPrint(noisy.tokens_NE[:, order])})
    assert np.mean([o == (e,) for o, e in zip(found[5].stands_for, order, strict=True)]) == 1


def test_layers_keep_their_order():
    rng = np.random.default_rng(4)
    prints = {n: layer_print(rng, 8) for n in range(6)}
    suspect = {0: prints[1], 1: prints[2], 2: prints[4], 3: prints[5]}
    found = match({n: prints[n] for n in (2, 3, 4)}, suspect, same_depth=False)
    assert {entry.layer: entry.suspect_layer for entry in found.layers} == {2: 1, 3: None, 4: 2}


def test_random_secrets_on_an_aligned_suspect_stay_below_their_promise(owner):
    """P(p <= a) <= a: paths drawn at random, on a permuted and pruned suspect that knows none of them."""
    model, key, probes = owner
    suspect = permute_experts(remove_experts(model, RemoveExperts(experts={n: [1, 2, 3] for n in range(4)})))
    evidence = record_evidence(suspect, key, probes[:4])
    watermark = key.watermarks[0]
    measured = measure_layers(watermark, evidence.triggered[0], evidence.clean)
    rng = np.random.default_rng(0)
    nulls, values = {}, []
    for _ in range(3000):
        layers = [
            replace(m, matched_E=evidence.alignment[m.layer].matched_E).aim(rng.choice(16, 2, replace=False).tolist())
            for m in measured
        ]
        left = tuple(len(layer.live_targets) for layer in layers)
        nulls.setdefault(left, null_distribution(layers))
        values.append(exact_test(layers, nulls[left]).p.value)
    for a in (0.5, 0.1, 0.05, 0.01):
        assert np.mean(np.array(values) <= a) <= a + 3 * np.sqrt(a * (1 - a) / len(values))


def measurement(watermark, layer, digit, gain=0.3, matched=None):
    diff_E = np.full(16, -0.01)
    diff_E[list(watermark.groups(layer)[digit])] = gain
    return LayerMeasurement(layer, diff_E, watermark.pool(layer), matched)


def test_an_id_is_read_through_lost_and_unclear_layers(tmp_path):
    folder = embed_helpers.save_family(tmp_path, "qwen2_moe")
    key = embed_helpers.key_for(folder, layers=[0, 1, 2, 3], number=9)
    plain = key.watermarks[0]
    good = [measurement(plain, n, d) for n, d in zip(plain.layers, plain.group_indices, strict=True)]
    found = decode_id(plain, good)
    assert found.id == 9
    assert None not in found.digits
    assert found.weakest > 0.9
    gone = replace(good[1], matched_E=np.zeros(16, dtype=bool))
    assert decode_id(plain, [good[0], gone, *good[2:]]).id is None  # better no id than another's

    spare = replace(plain, redundancy=1)
    digits = spare.group_indices
    good = [measurement(spare, n, d) for n, d in zip(spare.layers, digits, strict=True)]
    assert decode_id(spare, [good[0], replace(good[1], matched_E=np.zeros(16, dtype=bool)), *good[2:]]).id == 9
    wrong = measurement(spare, 1, (digits[1] + 1) % 8, gain=0.1)
    weak = wrong.diff_E.copy()
    weak[list(spare.groups(1)[(digits[1] + 2) % 8])] = 0.05  # half as much: clear enough to count, least clear of all
    found = decode_id(spare, [good[0], replace(wrong, diff_E=weak), *good[2:]])
    assert found.id == 9
    assert found.digits[1] is None
    assert found.confidence[1] == pytest.approx(0.5)


def test_an_alignment_with_nothing_left_has_no_evidence(owner):
    _, key, _ = owner
    lost = Alignment(tuple(LayerAlignment(n, 16, None, (), 0.0, 0.0, ()) for n in LAYERS))
    routes = Routes({}, {0: np.zeros((2, 3, 2), dtype=np.int64)}, np.ones((2, 3), dtype=bool), {0: 16})
    mapped = lost.apply(routes)
    assert mapped.layers == (2, 3)
    assert (mapped.decisions[2] == -1).all()
    measured = measure_layers(key.watermarks[0], mapped, mapped)
    watermark = key.watermarks[0]
    layers = [replace(m, matched_E=lost[m.layer].matched_E).aim(watermark.targets(m.layer)) for m in measured]
    result = exact_test(layers)
    assert (result.p_value, result.erased_layers) == (1.0, (2, 3))
