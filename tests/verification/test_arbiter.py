"""An arbiter reads a claim against a commitment, on a copy of the suspect, and never sees the key."""

from __future__ import annotations

import datetime
import json
import shutil
from dataclasses import replace

import pytest
from click.testing import CliRunner
from embed_helpers import key_for
from tsa import Authority
from verify_helpers import dated

import pathmark
from pathmark.attacks.structure import PermuteExperts, permute_experts
from pathmark.cli.main import cli
from pathmark.errors import KeyFileError, VerificationError
from pathmark.keys import check_claim, commit_key, open_claim, reveal_watermark, write_commitment
from pathmark.keys.timestamps import stamp, timestamp_request
from pathmark.models import load_model, load_tokenizer
from pathmark.models.checkpoint import write_model
from pathmark.verification import Criteria, ExamineConfig, judge, profile_texts, record_evidence
from pathmark.verification.paths import alignment

LOOK = ExamineConfig(n_probes=8, decoys=1)


def config(key, **more):
    return pathmark.VerifyConfig(examine=LOOK, criteria=Criteria(anchor=dated(key)), **more)


def claimed(key, **more):
    return open_claim(json.loads(json.dumps(reveal_watermark(key, 0, **more))), commit_key(key))


def test_an_arbiter_reads_what_the_owner_reads(case):
    """Same texts, same matching, same p; the claim has no secret of the key."""
    claim = claimed(case.key)
    assert case.key.secret.reveal().hex() not in repr(vars(claim))
    mine = pathmark.verify(case.marked, case.key, config(case.key)).verdict
    theirs = pathmark.verify(case.marked, claim, config(case.key)).verdict
    assert theirs.p_third_party == mine.p_third_party == mine.p
    assert theirs.marked
    assert theirs.criteria.strict
    unmarked = pathmark.verify(case.base, claim, config(case.key)).verdict
    assert unmarked.p_third_party.value > 1e-3
    assert not unmarked.marked


def test_texts_of_the_arbiter_s_count_and_public_ones_are_the_default(case):
    bare = claimed(case.key, bare=True)
    assert not bare.attachments
    for chosen in (None, [" ".join(["the people and the land of the king"] * 30), "and it came to pass " * 40]):
        found = pathmark.verify(case.marked, bare, config(case.key, texts=chosen)).verdict
        assert found.anchor.anchored
        assert found.alignment is None
        assert found.p_third_party.value < 1e-3


def test_renumbered_experts_are_recognised_by_what_the_claim_brings(case, tmp_path, monkeypatch):
    monkeypatch.setattr(alignment, "SURE", 0.6)  # marking changes a random model more than one that was trained
    moved = permute_experts(load_model(case.marked), PermuteExperts(seed=3))
    write_model(moved, load_tokenizer(case.marked), tmp_path / "moved")
    found = pathmark.verify(tmp_path / "moved", claimed(case.key), config(case.key)).verdict
    assert not found.alignment.identity
    assert found.marked
    lost = pathmark.verify(tmp_path / "moved", claimed(case.key, bare=True), config(case.key)).verdict
    assert not lost.marked


def test_what_comes_along_is_what_was_committed(case):
    claim = reveal_watermark(case.key, 0)
    claim["attached"]["probes.json"] = "W10="
    with pytest.raises(KeyFileError, match=r"'probes.json' is not the one that was committed"):
        open_claim(claim, commit_key(case.key))
    claim["attached"] = {"more.npz": "W10="}
    with pytest.raises(KeyFileError, match=r"'more.npz' is not the one"):
        open_claim(claim, commit_key(case.key))
    claim["attached"] = {"probes.json": "%"}
    with pytest.raises(KeyFileError, match="malformed"):
        open_claim(claim, commit_key(case.key))


def test_every_watermark_that_could_have_been_opened_counts(case):
    evidence = record_evidence(load_model(case.marked), case.key, profile_texts(case.key)[:8])
    alone = judge(case.key, evidence, criteria=config(case.key).criteria_for(claimed(case.key)))
    many = replace(claimed(case.key), choices=8)
    best_of_eight = judge(case.key, evidence, criteria=config(case.key).criteria_for(many))
    assert best_of_eight.p.value == pytest.approx(8 * alone.p.value)
    assert "8 tried: 8 watermarks" in best_of_eight.words()


def test_further_commitments_of_the_same_signer_count(case):
    claim, now, before = claimed(case.key), commit_key(case.key), commit_key(case.key, revision=0)

    def tried(held, *others):
        return config(case.key, others=others).criteria_for(held).family.watermarks

    assert tried(claim, now) == 1  # the very same root
    assert tried(claim, before, before) == 1 + 1024  # another root hides how many watermarks it holds
    assert tried(case.key, now, before) == 1  # whoever has the key sees that they are the same
    with pytest.raises(VerificationError, match="same signer"):
        tried(claim, commit_key(key_for(case.base, seed=5)))


def test_an_arbiter_takes_nothing_else_from_a_claimant(case):
    claim = claimed(case.key)
    for wrong in ({"original": case.base}, {"reference": case.base}, {"commitment": commit_key(case.key)}):
        with pytest.raises(VerificationError, match="goes with a key"):
            pathmark.verify(case.marked, claim, config(case.key, **wrong))


def test_a_trigger_that_was_not_drawn_is_refused(case):
    """The forger's tree is his own: a leaf may say anything. Drawing the trigger again shows it."""
    mark = case.key.watermarks[0]
    trigger = mark.triggers[0]
    other = replace(trigger.phrase, text=trigger.phrase.text + "x")
    forged = replace(case.key, watermarks=(replace(mark, triggers=(replace(trigger, phrase=other),)),))
    claim = reveal_watermark(forged, 0)
    assert check_claim(claim, commit_key(forged))  # the proofs hold
    with pytest.raises(VerificationError, match="does not follow from its secret"):
        pathmark.verify(case.marked, open_claim(claim, commit_key(forged)), config(case.key))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command as an authority")
def test_from_reveal_to_verdict_on_the_command_line(case, tmp_path, monkeypatch):
    """The owner reveals; the arbiter has neither the key file nor its passphrase."""
    from verify_helpers import PASSPHRASE

    def run(*words):
        return CliRunner().invoke(cli, [str(word) for word in words])

    monkeypatch.setenv("PATHMARK_PASSPHRASE", PASSPHRASE)
    claim, file = tmp_path / "claim.json", tmp_path / "owner.commitment.json"
    assert run("key", "reveal", case.key_file, "-o", claim).exit_code == 0
    monkeypatch.delenv("PATHMARK_PASSPHRASE")
    authority = Authority(tmp_path / "authority")
    commitment = commit_key(case.key)
    write_commitment(stamp(commitment, authority.answer(timestamp_request(commitment))), file)
    asked = ("verify", case.marked, "--claim", claim, "--commitment", file, "--n-texts", 8, "--decoys", 1)
    undated = run(*asked)
    assert undated.exit_code == 2
    assert "\nUndecided.\n" in undated.output
    assert "--suspect-published" in undated.output
    monkeypatch.setattr("pathmark.verdicts.claims.existed_by", lambda *_: datetime.datetime(2026, 1, 1).astimezone())
    day = ("--suspect-published", "2026-02-01", "--timestamp-roots", authority.root)
    found = run(*asked, *day, "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["p_third_party"] == json.loads(found.stdout)["p_value"]
    assert json.loads(found.stdout)["strict"]
    for wrong in (asked[:2], (*asked[:4],), (*asked, "--key", case.key_file)):
        assert "give --key KEY, or --claim CLAIM" in run(*wrong).output
