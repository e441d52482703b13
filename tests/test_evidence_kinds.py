"""Evidence of every kind of verification, on the command line and in Python."""

from __future__ import annotations

import datetime
import json
import shutil
import sys
from pathlib import Path

import fake_api
import pytest
from embed_helpers import key_for
from evidence_helpers import QUICK, run, secrets_of
from tsa import Authority
from verify_helpers import PASSPHRASE

import pathmark
from pathmark.errors import VerificationError
from pathmark.keys import Registry, commit_key, reveal_watermark, save_key, write_commitment
from pathmark.keys.timestamps import stamp, timestamp_request
from pathmark.models import load_model
from pathmark.results.bundlefile import read_bundle
from pathmark.results.evidence import EvidenceBundle
from pathmark.verification.recorded.routefile import write_routes


@pytest.fixture(scope="module")
def found(case):
    return pathmark.verify(case.marked, case.key, pathmark.VerifyConfig(examine=QUICK))


def test_command_line_of_verify(case, tmp_path, monkeypatch):
    monkeypatch.setenv("PATHMARK_PASSPHRASE", PASSPHRASE)
    monkeypatch.setattr(sys, "argv", ["pathmark", "verify", "x", "--evidence", "y"])
    write_commitment(commit_key(case.key), tmp_path / "owner.commitment.json")
    custody = tmp_path / "custody.toml"
    root = run("evidence", "root", case.marked).output.strip()
    custody.write_text(f'[[step]]\nwho = "A. Bailiff"\nwhen = "2026-11-02"\nhow = "seized"\nroot = "{root}"\n')
    words = ("verify", case.marked, "--key", case.key_file, "--n-texts", 6, "--decoys", 1)
    given = ("--commitment", tmp_path / "owner.commitment.json", "--custody", custody)
    result = run(*words, *given, "--evidence", tmp_path / "case.zip")
    assert result.exit_code == 0, result.output
    assert "it opens watermark 0: hand it only to those who judge" in result.output
    read = EvidenceBundle.load(tmp_path / "case.zip")
    assert read.run.command == ("pathmark", "verify", "x", "--evidence", "y")
    assert read.suspect.custody[0].who == "A. Bailiff"
    checked = run("evidence", "check", tmp_path / "case.zip", "--commitment", tmp_path / "owner.commitment.json")
    assert checked.exit_code == 0, checked.output
    refused = run(*words, "--evidence", tmp_path / "case.zip")
    assert "already exists" in str(refused.exception)
    custody.write_text(custody.read_text().replace(root, "0" * 64))
    other = run(*words, "--custody", custody, "--evidence", tmp_path / "other")
    assert "\nFound.\n" in other.output  # the verdict is shown whatever comes of the bundle
    assert "examine what was received" in str(other.exception)
    assert not (tmp_path / "other").exists()
    assert run("evidence", "check", tmp_path / "nowhere").exception is not None


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command as an authority")
def test_timestamps_count_under_the_reader_s_roots(case, tmp_path):
    authority, commitment = Authority(tmp_path / "authority"), commit_key(case.key)
    stamped = stamp(commitment, authority.answer(timestamp_request(commitment)))
    config = pathmark.VerifyConfig(examine=QUICK, commitment=stamped, timestamp_roots=authority.root)
    path = pathmark.verify(case.marked, case.key, config).write_evidence(tmp_path / "case")
    unsure = pathmark.check_evidence(path, commitment=stamped)
    assert unsure.holds
    assert unsure.found.existed_by is None
    assert "timestamp-roots.pem: by authorities of the maker's choice it existed on 20" in unsure.words()
    sure = pathmark.check_evidence(path, commitment=stamped, timestamp_roots=authority.root)
    assert f"existed no later than {datetime.datetime.now(datetime.UTC):%Y-%m-%d}" in sure.words()
    assert "What this check cannot tell" not in sure.words()


def test_evidence_of_recorded_routes(case, tmp_path, monkeypatch):
    monkeypatch.setenv("PATHMARK_PASSPHRASE", PASSPHRASE)
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
    from record_routes_transformers import record

    assert run("probes", "--key", case.key_file, "-o", tmp_path / "probes.jsonl", "--n-texts", 8).exit_code == 0
    lines = [json.loads(line) for line in (tmp_path / "probes.jsonl").read_text().splitlines()]
    recorded = record(load_model(case.marked), [(line["probe"], line["token_ids"]) for line in lines], masses=False)
    write_routes(tmp_path / "routes.jsonl", recorded)
    Registry(tmp_path / "licensees.db").issue(case.key, "Ada Ltd")
    words = ("--key", case.key_file, "--significance", "1e-3", "--evidence")
    assert run("verify-routes", tmp_path / "routes.jsonl", *words, tmp_path / "verified").exit_code == 0
    book = ("--registry", tmp_path / "licensees.db")
    assert run("trace-routes", tmp_path / "routes.jsonl", *book, *words, tmp_path / "traced").exit_code == 0
    for name in ("verified", "traced"):
        checked = pathmark.check_evidence(tmp_path / name)
        assert checked.holds, checked.words()
        assert checked.bundle.suspect.kind == "routes"
        assert [file.path for file in checked.bundle.suspect.files] == ["routes.jsonl"]
        assert not checked.bundle.measured.watermarks[0].masses_known
        assert all(d == int(d) for row in checked.bundle.measured.watermarks[0].layers for d in row.difference)


def test_a_claim_cannot_sign(case, tmp_path):
    claim = pathmark.open_claim(reveal_watermark(case.key, 0), commit_key(case.key))
    found = pathmark.verify(case.marked, claim, pathmark.VerifyConfig(examine=QUICK))
    with pytest.raises(VerificationError, match="signed with the owner's key"):
        found.write_evidence(tmp_path / "case")
    (tmp_path / "claim.json").write_text(json.dumps(reveal_watermark(case.key, 0)))
    write_commitment(commit_key(case.key), tmp_path / "key.json")
    asked = ("--claim", tmp_path / "claim.json", "--commitment", tmp_path / "key.json", "--evidence", tmp_path / "case")
    assert "give --key instead of --claim" in run("verify", case.marked, *asked).output


@pytest.mark.parametrize(
    ("text", "said"),
    [("x = ", "is no TOML"), ("x = 1", "has no steps"), ("[[step]]\nwho = 'x'", "other fields"), (None, "cannot read")],
)
def test_custody_files_are_checked(found, tmp_path, text, said):
    if text is not None:
        (tmp_path / "custody.toml").write_text(text)
    with pytest.raises(VerificationError, match=said):
        found.write_evidence(tmp_path / "case", pathmark.EvidenceConfig(custody=tmp_path / "custody.toml"))


def test_evidence_of_replies(tmp_path, monkeypatch):
    monkeypatch.setenv("PATHMARK_PASSPHRASE", PASSPHRASE)
    key = key_for("bundled:tiny", triggers=4, watermarks=2)
    save_key(key, tmp_path / "owner.key", PASSPHRASE)
    common = ("--key", tmp_path / "owner.key", "--trials", 8, "--max-tokens", 16)
    with fake_api.FakeApi(fake_api.marked(key)) as api:
        words = ("verify-api", api.url, "--model", "suspect", *common, "--evidence", tmp_path / "case")
        assert run(*words).exit_code == 0
    checked = pathmark.check_evidence(tmp_path / "case")
    assert checked.holds, checked.words()
    assert checked.bundle.suspect.kind == "replies"
    (again,) = checked.found.recomputed
    assert again.p.value < 1e-3
    everything = b"".join(read_bundle(tmp_path / "case").values())
    assert not [secret for secret in secrets_of(key, 1) if secret in everything]
    assert [secret for secret in secrets_of(key, 0) if secret in everything]
    with pytest.raises(VerificationError, match="only a reading of weights"):
        pathmark.replay_evidence(tmp_path / "case", "bundled:tiny")


def test_the_verdict_on_replies_is_computed_again(tmp_path):
    key = key_for("bundled:tiny", triggers=4)
    with fake_api.FakeApi(fake_api.marked(key)) as api:
        config = pathmark.ApiConfig(model="suspect", trials=8, max_tokens=16, keep=True)
        found = pathmark.verify_api(api.url, key, config)
    path = found.write_evidence(tmp_path / "case")
    (again,) = pathmark.check_evidence(path).found.recomputed
    assert again.p.log10 == pytest.approx(found.p.log10)


def test_evidence_of_a_trace(case, tmp_path):
    book = Registry(tmp_path / "licensees.db")
    book.issue(case.key, "Ada Ltd")
    config = pathmark.TraceConfig(examine=QUICK, significance=1e-3)
    traced = pathmark.trace(case.marked, case.key, book, config)
    assert traced.decision == "licensee"
    path = traced.write_evidence(tmp_path / "case")
    checked = pathmark.check_evidence(path)
    assert checked.holds, checked.words()
    assert checked.bundle.measured.watermarks[0].id == traced.ids[traced.result.best]
    assert checked.bundle.words.startswith("# Found.\n\nThis is the copy of")
    assert pathmark.replay_evidence(path, case.marked).same
