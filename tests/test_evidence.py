"""Evidence bundles: whoever gets one can check it without the key and without torch, and learns no other secret."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import stat
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from embed_helpers import key_for
from evidence_helpers import QUICK, run, secrets_of
from verify_helpers import PASSPHRASE

import pathmark
from pathmark.errors import ResultError, VerificationError
from pathmark.keys import commit_key
from pathmark.keys.attestation import attest
from pathmark.models import load_model, load_tokenizer
from pathmark.models.checkpoint import write_model
from pathmark.reporting.barcode import encode_path, read_barcode
from pathmark.results.bundlefile import read_bundle, write_bundle, zip_bytes
from pathmark.results.evidence import PREDICATE, EvidenceBundle
from pathmark.results.evidence_check import check_bundle, listed
from pathmark.verification import attach_profiles, profile_texts


@pytest.fixture(scope="module")
def found(case):
    return pathmark.verify(case.marked, case.key, pathmark.VerifyConfig(examine=QUICK))


@pytest.fixture(scope="module")
def bundle(found, tmp_path_factory):
    config = pathmark.EvidenceConfig(obtained="bought", command=("pathmark", "verify", "it"))
    return found.write_evidence(tmp_path_factory.mktemp("evidence") / "case-17", config)


@pytest.fixture(scope="module")
def double(case):
    """A key of two watermarks that nobody embedded, one in front of the other."""
    key = replace(key_for(case.base, watermarks=2, triggers=2, seed=5), owner="Example Lab")
    return attach_profiles(key, load_model(case.base), profile_texts(case.key))


def test_a_bundle_holds_everything_and_checks(bundle, found, case):
    checked = pathmark.check_evidence(bundle, commitment=commit_key(case.key, created=_created(bundle)))
    assert checked.holds, checked.words()
    assert checked.found.fingerprint == case.key.fingerprint
    (again,) = checked.found.recomputed
    assert (again.watermark, again.choices) == (0, 1)
    assert again.p.log10 == pytest.approx(found.p.log10, abs=1e-9)
    assert checked.words().startswith("The bundle holds.\n")
    read = EvidenceBundle.load(bundle)
    assert {name.partition("/")[0] for name in read.files} == {
        "VERDICT.md", "REVEALED.md", "verdict.json", "run.json", "suspect.json", "measured.json", "commitment.json",
        "claim-0.json", "barcode-0-expected.svg", "barcode-0-recovered.svg", "statement.dsse.json",
    }  # fmt: skip
    assert read.words.startswith("# Found.\n")
    assert read.run.command == ("pathmark", "verify", "it")
    assert read.suspect.custody[0].how == "bought"
    assert {file.path for file in read.suspect.files} == {path.name for path in case.marked.iterdir()}
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in bundle.rglob("*")} == {0o600}


def _created(bundle):
    return json.loads((bundle / "commitment.json").read_text())["created"]


def test_the_reader_has_what_a_page_shows(bundle, case, tmp_path):
    read = EvidenceBundle.load(bundle)
    (mark,) = read.measured.watermarks
    watermark = case.key.watermarks[0]
    assert [row.layer for row in mark.layers] == list(watermark.layers)
    for row in mark.layers:
        assert row.targets == watermark.targets(row.layer)
        assert sum(row.triggered) == pytest.approx(1, abs=1e-4)
        assert sum(row.clean) == pytest.approx(1, abs=1e-4)
        assert row.difference == pytest.approx([t - c for t, c in zip(row.triggered, row.clean, strict=True)], abs=1e-5)
        assert sum(row.triggered[e] for e in row.targets) > sum(row.clean[e] for e in row.targets)
    assert len(mark.null.statistics) == len(mark.null.log10_p)
    assert list(mark.null.log10_p) == sorted(mark.null.log10_p, reverse=True)
    assert mark.null.log10_p[-1] == pytest.approx(mark.exact.log10_floor, abs=1e-6)
    assert len(mark.probe) == len(read.measured.probes.tokens[0])
    assert "".join(token.text for token in mark.probe) == read.measured.probes.texts[0]
    assert all(len(token.triggered) == len(watermark.layers) for token in mark.probe)
    assert len(mark.decoys) == 2
    assert mark.barcodes.expected == watermark.group_indices
    (tmp_path / "code.svg").write_text(read.barcode(0, "expected"))
    assert read_barcode(tmp_path / "code.svg") == watermark.group_indices


def test_two_hundred_changed_bytes_are_found_and_named(bundle, tmp_path):
    files = read_bundle(bundle)
    draw = random.Random(0)
    places = [(name, i) for name, content in sorted(files.items()) for i in range(len(content))]
    missed = []
    for name, i in [draw.choice(places) for _ in range(100)] + [
        (name, draw.randrange(len(files[name]))) for name in sorted(files) for _ in range(100 // len(files) + 1)
    ]:
        changed = bytearray(files[name])
        changed[i] ^= draw.randrange(1, 256)
        problems = check_bundle(EvidenceBundle({**files, name: bytes(changed)})).problems
        if not any(problem.startswith(f"{name}:") for problem in problems):
            missed.append((name, i, problems))
    assert not missed


def test_missing_and_additional_files_are_named(bundle):
    files = read_bundle(bundle)
    for name in files:
        kept = {other: content for other, content in files.items() if other != name}
        assert any(p.startswith(f"{name}: missing") for p in check_bundle(EvidenceBundle(kept)).problems)
    added = check_bundle(EvidenceBundle({**files, "more.txt": b"x"}))
    assert added.problems == ("more.txt: not part of what was signed",)


def test_a_zip_is_the_same_and_no_byte_of_it_may_change(bundle, found, tmp_path):
    zipped = found.write_evidence(tmp_path / "case", pathmark.EvidenceConfig(zip=True))
    assert zipped.name == "case.zip"
    assert stat.S_IMODE(zipped.stat().st_mode) == 0o600
    assert pathmark.check_evidence(zipped).holds
    files = read_bundle(bundle)
    whole, draw = zip_bytes(files), random.Random(1)
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        starts = {entry.filename: entry.header_offset + 30 + len(entry.filename) for entry in archive.infolist()}
    for i in [draw.randrange(len(whole)) for _ in range(40)]:
        changed = bytearray(whole)
        changed[i] ^= draw.randrange(1, 256)
        (tmp_path / "changed.zip").write_bytes(changed)
        with pytest.raises(ResultError, match=r"changed\.zip") as refused:
            EvidenceBundle.load(tmp_path / "changed.zip")
        inside = [name for name, start in starts.items() if start <= i < start + len(files[name])]
        assert all(name in str(refused.value) for name in inside)


def test_figures_that_do_not_follow_are_found_although_signed(bundle, case):
    """The owner may sign anything; what does not follow from the record or the commitment is still found."""

    def signed(**changed):
        files = {n: c for n, c in read_bundle(bundle).items() if n != "statement.dsse.json"} | changed
        suspect = json.loads(files["suspect.json"])
        predicate = {"version": 1, "files": listed(files)}
        statement = attest(case.key, PREDICATE, suspect["name"], suspect["root"], predicate)
        return check_bundle(EvidenceBundle({**files, "statement.dsse.json": statement})).problems

    def edited(name, change):
        document = json.loads((bundle / name).read_text())
        change(document)
        return {name: json.dumps(document).encode()}

    assert signed() == ()
    better = signed(**edited("measured.json", lambda d: d["watermarks"][0]["exact"].update(log10_p=-30.0)))
    assert better == ("measured.json: the figures of watermark 0 do not follow from its layers",)
    moved = signed(**edited("measured.json", lambda d: d["watermarks"][0]["layers"][0].update(targets=[0, 1])))
    assert any("layer 0 has other experts than were committed" in problem for problem in moved)
    fewer = signed(**edited("measured.json", lambda d: d["watermarks"][0]["layers"].pop()))
    assert any("has other layers than were committed" in problem for problem in fewer)
    verdict = signed(**edited("verdict.json", lambda d: d.update(log10_p=-30.0)))
    assert verdict == ("verdict.json: its p-value does not follow from what was recorded",)
    other = signed(**edited("suspect.json", lambda d: d["files"][0].update(sha256="0" * 64)))
    assert other == ("suspect.json: its files do not give the root that was signed",)
    claim = signed(**edited("claim-0.json", lambda d: d["openings"][1]["leaf"]["content"].update(index=1)))
    assert any(problem.startswith("claim-0.json: the claim does not hold") for problem in claim)


def test_only_the_signer_s_own_commitment_fits(bundle, double, case, tmp_path):
    foreign = pathmark.check_evidence(bundle, commitment=commit_key(double))
    assert foreign.found.problems == ("commitment.json: another one than the published commitment that you gave",)
    files = read_bundle(bundle)
    del files["statement.dsse.json"]
    suspect = json.loads(files["suspect.json"])
    thief = attest(double, PREDICATE, suspect["name"], suspect["root"], {"version": 1, "files": listed(files)})
    problems = check_bundle(EvidenceBundle({**files, "statement.dsse.json": thief})).problems
    assert problems == (f"commitment.json: made by {case.key.fingerprint}, the bundle by {double.fingerprint}",)


def test_the_check_needs_neither_torch_nor_key(bundle):
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'tokenizers', 'safetensors', 'accelerate'): sys.modules[name] = None\n"
        f"sys.argv = ['pathmark', 'evidence', 'check', {str(bundle)!r}]\n"
        "from pathmark.cli.main import main\n"
        "main()"
    )
    keyless = {name: value for name, value in os.environ.items() if name != "PATHMARK_PASSPHRASE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=keyless, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The bundle holds.")
    assert "Watermark 0 is the one that was committed" in done.stdout


def test_a_replay_gives_the_same_figures(bundle, case, monkeypatch):
    monkeypatch.delenv("PATHMARK_PASSPHRASE", raising=False)
    again = run("evidence", "replay", bundle, "--suspect", case.marked, "--json")
    assert again.exit_code == 0, again.output
    told = json.loads(again.stdout)
    assert (told["same_files"], told["same_figures"]) == (True, True)
    assert told["watermarks"][0]["log10_p"] == told["watermarks"][0]["log10_p_again"]
    assert told["watermarks"][0]["largest_difference"] == 0
    other = run("evidence", "replay", bundle, "--suspect", case.base)
    assert other.exit_code == 1
    assert other.output.count("Other figures came out.\nThe files are not those that the bundle is about") == 1


def test_nothing_is_in_it_that_was_not_meant_to_be(case, double, tmp_path):
    """The second of two watermarks is opened, the first stays secret; and the other way round."""
    found = pathmark.verify(case.base, double, pathmark.VerifyConfig(examine=QUICK))
    master = double.secret.reveal()
    for opened, kept in ((1, 0), (0, 1)):
        path = found.write_evidence(tmp_path / f"case-{opened}", pathmark.EvidenceConfig(reveal=(opened,)))
        files = read_bundle(path)
        payload = base64.b64decode(json.loads(files["statement.dsse.json"])["payload"])
        written = [*files.values(), payload]
        everything = b"\n".join([*written, *(b"".join(content.split()) for content in written)])
        hidden = [*secrets_of(double, kept), master, master.hex().encode(), base64.b64encode(master)]
        assert not [s for s in [*hidden, PASSPHRASE.encode()] if s in everything or b"".join(s.split()) in everything]
        shown = secrets_of(double, opened)
        assert shown[1] in everything, "the opened one must be there, or this test cannot fail"
        measured = EvidenceBundle.load(path).measured
        assert [mark.watermark for mark in measured.watermarks] == [opened]
        blocks = [json.dumps(list(block)).encode() for block in double.watermarks[kept].blocks]
        assert not [block for block in blocks if block in everything or block.replace(b" ", b"") in everything]
        digits = encode_path(double.watermarks[kept].group_indices).encode()
        assert digits not in everything
        paths = [row["watermark"] for row in json.loads(files["verdict.json"])["layers"]]
        assert set(paths) == {opened}
        told = files["REVEALED.md"].decode()
        assert f"- watermark {opened}: its triggers" in told
        assert f"- watermarks {kept}: triggers, reply marks" in told
        checked = pathmark.check_evidence(path)
        assert checked.holds, checked.words()
        assert checked.found.recomputed[0].choices == 2
    again = pathmark.replay_evidence(tmp_path / "case-1", case.base)
    assert again.same


def test_nothing_opened_is_said(found, tmp_path, case):
    path = found.write_evidence(tmp_path / "closed", pathmark.EvidenceConfig(reveal=()))
    checked = pathmark.check_evidence(path)
    assert checked.holds
    assert "no watermark is opened" in checked.words()
    everything = b"".join(read_bundle(path).values())
    assert not [secret for secret in secrets_of(case.key, 0) if secret in everything]
    with pytest.raises(VerificationError, match="opens no watermark"):
        pathmark.replay_evidence(path, case.marked)


def test_an_existing_folder_is_kept(bundle, found, tmp_path):
    (tmp_path / "case").mkdir()
    with pytest.raises(ResultError, match="already exists"):
        found.write_evidence(tmp_path / "case")
    with pytest.raises(VerificationError, match="watermark 3 does not exist"):
        found.write_evidence(tmp_path / "new", pathmark.EvidenceConfig(reveal=(3,)))
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "a").symlink_to("/etc/hostname")
    with pytest.raises(ResultError, match="plain files only"):
        read_bundle(tmp_path / "link")


def test_bundles_are_written_whole_or_not(tmp_path, monkeypatch):
    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathmark.results.bundlefile.write_private", full)
    with pytest.raises(ResultError, match="No space left"):
        write_bundle(tmp_path / "case", {"a": b"x"})
    assert not list(tmp_path.iterdir())


def test_a_model_that_was_changed_after_receipt_is_another(case, bundle, tmp_path):
    copy = tmp_path / "copy"
    write_model(load_model(case.marked), load_tokenizer(case.marked), copy)
    (copy / "notes.txt").write_text("x")
    again = pathmark.replay_evidence(bundle, copy)
    assert (again.same_files, again.same) == (False, True)
    assert Path(again.suspect) == copy
