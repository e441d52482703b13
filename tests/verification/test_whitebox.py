"""The verdict on real models: marked, unmarked, somebody else's, random; and its two readings."""

from __future__ import annotations

import datetime
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from embed_helpers import key_for, save_family
from scipy import stats as scipy_stats
from verify_helpers import dated, mark_quickly

from pathmark.attacks.structure import rotate_residual
from pathmark.errors import VerificationError
from pathmark.keys import commit_key
from pathmark.models import load_model
from pathmark.stats import Family, exact_test
from pathmark.verification import (
    Criteria,
    ExamineConfig,
    examine,
    judge,
    judge_anchor,
    profile_texts,
    record_evidence,
    record_grafted,
    trace_copy,
    verify_model,
    with_reference,
)

LOW = Criteria(significance=1e-3)


def test_the_marked_model_and_nobody_else(case, tmp_path):
    probes = profile_texts(case.key)
    verdict = verify_model(load_model(case.marked), case.key, probes)
    assert verdict.marked
    assert verdict.id == 3
    assert verdict.p.log10 <= verdict.p_floor.log10 + 1
    assert not verify_model(load_model(case.base), case.key, probes).marked
    others = mark_quickly(case.base, key_for(case.base, seed=7), tmp_path / "other")
    model = load_model(tmp_path / "other")
    assert not verify_model(model, case.key, probes).marked
    assert verify_model(model, others, probes).marked


def test_random_models_are_never_marked(case, tmp_path):
    probes = profile_texts(case.key)[:4]
    for seed in range(20):
        suspect = save_family(tmp_path / str(seed), "qwen3_moe", seed=100 + seed)
        verdict = verify_model(load_model(suspect), case.key, probes)
        assert not verdict.marked
        assert verdict.id is None


@pytest.mark.parametrize(("which", "fed"), [("base", False), ("marked", False), ("marked", True)])
def test_p_values_of_strangers_keys_are_valid(case, which, fed):
    """P(p <= a) <= a over random keys with the alignment on, on an unmarked and on somebody else's marked model.

    Fed by the original's lower layers as well as by its own.
    """
    model, original = load_model(getattr(case, which)), load_model(case.base)
    probes = profile_texts(case.key)[:2]
    rng = random.Random(1)
    evidence = None
    p_values = []
    for _ in range(1000):
        # one recording serves many keys that share a trigger: the targets are what is random under the null
        if evidence is None or rng.random() < 0.01:
            stranger = key_for(case.base, seed=rng.randrange(2**40))
            for name, data in case.key.attachments.items():
                stranger = stranger.attach(name, data)
            evidence = (
                record_grafted(model, original, stranger, probes) if fed else record_evidence(model, stranger, probes)
            )
            measured = evidence.measured(stranger)[0]
        p_values.append(exact_test([m.aim(_random_targets(rng, m.pool)) for m in measured]).p_value)
    for level in (0.5, 0.1, 0.05, 0.01):
        hits = int((np.array(p_values) <= level).sum())
        assert scipy_stats.binomtest(hits, len(p_values), level, alternative="greater").pvalue > 1e-4


def _random_targets(rng, pool):
    return tuple(sorted(rng.sample(list(pool), 2)))


def test_what_a_thief_broke_below_the_mark_is_left_out_by_a_graft(case, tmp_path):
    key = mark_quickly(case.base, key_for(case.base, layers=(2, 3), number=3), tmp_path / "marked")
    probes, original, model = profile_texts(key), load_model(case.base), load_model(tmp_path / "marked")
    untouched = verify_model(model, key, probes, criteria=LOW)
    assert untouched.marked
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.model.layers[0].parameters():
            parameter.normal_(std=float(parameter.std()) + 1.0)
    alone = verify_model(model, key, probes, criteria=LOW)
    assert not alone.marked
    anchor = dated(key)
    verdict = verify_model(model, key, probes, original=original, criteria=replace(LOW, anchor=anchor))
    assert verdict.marked
    assert verdict.grafted
    assert verdict.id == 3
    assert verdict.criteria.family.statistics == 2
    assert verdict.p.log10 == pytest.approx(untouched.p.log10 + np.log10(2), abs=1e-6)  # tried twice
    assert verdict.other.p.log10 == pytest.approx(min(0, alone.p.log10 + np.log10(2)), abs=1e-6)
    assert verdict.anchor.anchored
    assert verdict.p_third_party == verdict.other.p  # and yet the graft is the owner's own reading
    assert any("choose the original's layers" in weakness for weakness in verdict.weaknesses())
    assert "fed by the original's layers" in verdict.words()
    turned = rotate_residual(model)  # which would hide the break, were the original's layers not turned as well
    assert not verify_model(turned, key, probes, criteria=LOW).marked
    again = verify_model(turned, key, probes, original=original, criteria=LOW)
    assert again.grafted
    assert again.p.log10 == pytest.approx(verdict.p.log10, abs=1e-3)


def test_a_graft_convicts_nobody_else(case, tmp_path):
    probes, original = profile_texts(case.key), load_model(case.base)
    assert not verify_model(original, case.key, probes, original=original).marked
    for seed in range(5):
        stranger = load_model(save_family(tmp_path / str(seed), "qwen3_moe", seed=200 + seed))
        assert not verify_model(stranger, case.key, probes[:6], original=original).marked
    sound = verify_model(load_model(case.marked), case.key, probes, original=original)
    assert sound.marked
    assert not sound.grafted  # both readings say the same; the plain one is everybody's
    assert sound.other.grafted


def test_what_a_third_party_reads(case, monkeypatch):
    probes = profile_texts(case.key)[:6]
    evidence = record_evidence(load_model(case.marked), case.key, probes)
    undated = judge(case.key, evidence)
    assert undated.marked
    assert undated.p_third_party.value == 1
    assert not judge(case.key, evidence, criteria=Criteria(strict=True)).marked
    early = commit_key(case.key, created="2026-02-01T00:00:00Z")
    own_word = judge_anchor(case.key, early, datetime.date(2026, 3, 1))
    assert not own_word.anchored
    assert "only what its owner says" in own_word.reason
    stamped = datetime.datetime(2026, 2, 1, 23, 59, tzinfo=datetime.UTC)  # what a trusted authority is taken to say
    monkeypatch.setattr("pathmark.verdicts.claims.existed_by", lambda commitment, roots: stamped)
    anchored = judge_anchor(case.key, early, datetime.date(2026, 3, 1))
    assert "existed no later than 2026-02-01" in anchored.reason
    strict = judge(case.key, evidence, criteria=Criteria(anchor=anchored, strict=True))
    assert strict.marked
    assert strict.p_third_party == strict.p
    late = judge_anchor(case.key, early, datetime.date(2026, 2, 1))
    assert not late.anchored
    assert late.charge_bits > 80
    assert not judge_anchor(case.key, early).anchored
    with pytest.raises(VerificationError, match="yet to come"):
        judge_anchor(case.key, early, datetime.date.today() + datetime.timedelta(days=2))
    with pytest.raises(VerificationError, match="does not fit the key"):
        judge_anchor(case.key, commit_key(key_for(case.base, seed=5)), datetime.date(2026, 3, 1))


def test_everything_tried_is_charged(case):
    evidence = record_evidence(load_model(case.marked), case.key, profile_texts(case.key)[:6])
    alone = judge(case.key, evidence)
    many = judge(case.key, evidence, criteria=Criteria(family=Family(suspects=1000)))
    assert many.p.log10 == pytest.approx(alone.p.log10 + 3)


def test_decoys_are_a_control(case):
    unmarked = examine(str(case.base), case.key, ExamineConfig(n_probes=8, decoys=4))
    control = judge(case.key, unmarked.evidence).decoys
    assert len(control.p_values) == 4
    assert control.smallest.value > 1e-3
    # and they can fail: the real trigger as a decoy
    evidence = examine(str(case.marked), case.key, ExamineConfig(n_probes=8, decoys=0)).evidence
    fooled = type(evidence)(evidence.clean, evidence.triggered, evidence.triggered, evidence.alignment)
    verdict = judge(case.key, fooled)
    assert verdict.decoys.smallest.value < 1e-4
    assert any("decoy" in weakness for weakness in verdict.weaknesses())


def test_a_reference_stands_in_for_the_key_s_profiles(case):
    swapped = with_reference(case.key, str(case.marked))
    examined = examine(str(case.marked), swapped, ExamineConfig(n_probes=6, decoys=0))
    assert examined.evidence.alignment.identity
    assert judge(swapped, examined.evidence).marked
    assert case.key.attachments["profiles.npz"] != swapped.attachments["profiles.npz"]


def test_streamed_and_loaded_give_the_same_verdict(case):
    examined = [examine(str(case.marked), case.key, ExamineConfig(n_probes=6, stream=h)) for h in ("always", "never")]
    assert [each.access for each in examined] == ["streamed weights", "weights"]
    assert all(each.evidence.alignment.layers[0].parts for each in examined)
    assert (
        examined[0].evidence.alignment.summary()["layers"][0]["parts"]
        == (examined[1].evidence.alignment.summary()["layers"][0]["parts"])
    )
    verdicts = [judge(case.key, each.evidence) for each in examined]
    first, second = (verdict.summary() for verdict in verdicts)
    assert first["p_value"] == pytest.approx(second["p_value"], rel=1e-6)
    for mine, theirs in zip(first["layers"], second["layers"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_tracing_names_the_licensee(case, tmp_path):
    from pathmark.keys import Registry

    book = Registry(tmp_path / "licensees.db")
    for name in ("Ada Ltd", "Brecht GmbH", "Curie SA"):
        book.issue(case.key, name)
    leaker = book.entries()[1]
    mark_quickly(case.base, case.key.with_id(leaker.id), tmp_path / "leaked")
    evidence = record_evidence(load_model(tmp_path / "leaked"), case.key, profile_texts(case.key))
    traced = trace_copy(case.key, evidence, book.entries(), criteria=LOW)
    assert traced.result.decision == "licensee", traced.words()
    assert traced.summary()["licensee"] == "Brecht GmbH"
    clean = record_evidence(load_model(case.base), case.key, profile_texts(case.key))
    assert trace_copy(case.key, clean, book.entries()).result.decision == "none"
