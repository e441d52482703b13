"""Evidence bundles: whoever gets one can check it without the key and without torch, and learns no other secret."""

from __future__ import annotations

import base64
import hashlib
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

import fake_api
import pytest
from click.testing import CliRunner
from embed_helpers import key_for
from verify_helpers import PASSPHRASE

import pathmark
from pathmark.cli.main import cli
from pathmark.errors import PathmarkError, ResultError, VerificationError
from pathmark.keys import Registry, commit_key, save_key, write_commitment
from pathmark.keys.attestation import attest, read_attestation
from pathmark.keys.modelroot import model_files, model_root, serialization, signature_statement
from pathmark.models import load_model, load_tokenizer
from pathmark.models.checkpoint import write_model
from pathmark.reporting.barcode import read_barcode
from pathmark.results.bundlefile import read_bundle, write_bundle, zip_bytes
from pathmark.results.evidence import PREDICATE, EvidenceBundle
from pathmark.results.evidence_check import check_bundle, listed
from pathmark.verification import attach_profiles, profile_texts

QUICK = pathmark.ExamineConfig(n_probes=6, decoys=2)


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


def run(*arguments):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit | PathmarkError):
        raise result.exception
    return result


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


def secrets_of(key, watermark):
    """What must not be read by anybody: in every form in which it could leak."""
    mark = key.watermarks[watermark]
    found = [mark.subkey.reveal(), mark.subkey.reveal().hex().encode(), base64.b64encode(mark.subkey.reveal())]
    for trigger in mark.triggers:
        for phrase in (trigger.phrase, trigger.mark):
            tokens = list(phrase.tokens)
            found += [phrase.text.strip().encode(), json.dumps(tokens).encode(), json.dumps(tokens)[1:-1].encode()]
    return found


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


def test_an_independent_reader_accepts_the_envelope(bundle, case):
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import SSlibKey

    data = (bundle / "statement.dsse.json").read_bytes()
    signer = SSlibKey(case.key.fingerprint, "ed25519", "ed25519", {"public": case.key.public_key.hex()})
    envelope = Envelope.from_dict(json.loads(data))
    assert envelope.payload_type == "application/vnd.in-toto+json"
    assert envelope.verify([signer], 1).keys() == {case.key.fingerprint}
    statement = json.loads(envelope.payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"][0]["digest"]["sha256"] == read_attestation(data, PREDICATE).sha256


def nested_model(folder):
    """Names that sort otherwise as texts than as paths, and what version control adds."""
    for name in ("config.json", "a-b/x", "a/x", "a/b/y", "a.json", ".gitattributes", ".git/HEAD"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_the_root_is_that_of_model_signing(case, tmp_path):
    import model_signing.hashing
    from model_signing._signing.signing import Payload

    for folder in (case.marked, nested_model(tmp_path / "nested")):
        theirs = Payload(model_signing.hashing.hash(folder)).statement.pb
        assert model_root(model_files(folder)) == theirs.subject[0].digest["sha256"]


def test_model_signing_verifies_our_root(tmp_path):
    """Our list of files and its root, under somebody's signature in that format: `model_signing` accepts the folder."""
    import model_signing
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    from pathmark.keys.attestation import PAYLOAD, pae

    folder = nested_model(tmp_path / "model")
    payload = json.dumps(signature_statement("model", model_files(folder), serialization(folder))).encode()
    signer = ec.generate_private_key(ec.SECP256R1())
    public = signer.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signature = base64.b64encode(signer.sign(pae(PAYLOAD, payload), ec.ECDSA(hashes.SHA256()))).decode()
    signed = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": hashlib.sha256(public).hexdigest()}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD,
            "signatures": [{"sig": signature, "keyid": ""}],
        },
    }
    (tmp_path / "key.pub").write_bytes(public)
    (tmp_path / "model.sig").write_text(json.dumps(signed))
    config = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=tmp_path / "key.pub")
    config.verify(folder, tmp_path / "model.sig")
    (folder / "a.json").write_text("changed")
    with pytest.raises(ValueError, match="mismatch"):
        config.verify(folder, tmp_path / "model.sig")


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
