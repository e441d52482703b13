"""Key files: what was written opens again, and everything else is one clear line without the secret."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import stat
import threading
import traceback
from pathlib import Path

import pytest
from key_fixtures import GOLDEN, PASSPHRASE, golden_key, make_key, secret_forms

from pathmark.errors import KeyFileError
from pathmark.keys import OwnerKey, amend_key, load_key, rotate_passphrase, save_key
from pathmark.keys.canonical import canonical
from pathmark.keys.keyfile import PassphraseSource, is_plain, no_passphrase, seal, unseal

FAST = 1 << 8


@pytest.fixture
def encrypted(tmp_path: Path) -> Path:
    path = tmp_path / "owner.key"
    save_key(golden_key(), path, PASSPHRASE, scrypt_n=FAST)
    return path


def private_copy(source: Path, folder: Path) -> Path:
    copied = folder / source.name
    shutil.copy(source, copied)
    copied.chmod(0o600)
    return copied


def refusal(data: bytes, passphrase: PassphraseSource = PASSPHRASE) -> str:
    """The line with which these bytes are refused; checks that nothing secret is in its traceback."""
    with pytest.raises(KeyFileError) as caught:
        unseal(data, passphrase, name="owner.key")
    shown = "".join(traceback.format_exception(caught.value)).encode()
    assert not any(form in shown for form in secret_forms(golden_key()))
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 250
    return line


@pytest.mark.parametrize("name", ["key-v1-plain.key", "key-v1-encrypted.key"])
def test_golden_keys_still_give_the_same_path(name: str, tmp_path: Path) -> None:
    key = load_key(private_copy(GOLDEN / name, tmp_path), no_passphrase if "plain" in name else PASSPHRASE)
    expected = json.loads((GOLDEN / "derivation-v1.json").read_text())
    assert key == golden_key()
    assert key.fingerprint == expected["fingerprint"]
    for mark, row in zip(key.watermarks, expected["watermarks"], strict=True):
        assert {str(layer): list(t) for layer, t in mark.path.items()} == row["path"]
    assert key.attachments == {"sketches.npz": b"sketches of experts"}


def test_round_trip_and_mode(encrypted: Path) -> None:
    assert load_key(encrypted, PASSPHRASE) == golden_key()
    assert stat.S_IMODE(encrypted.stat().st_mode) == 0o600
    assert list(encrypted.parent.iterdir()) == [encrypted]
    assert not is_plain(encrypted)


def test_mode_is_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        save_key(make_key(), tmp_path / "a.key", None, plain=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.key").stat().st_mode) == 0o600


def test_never_overwrites(encrypted: Path) -> None:
    before = encrypted.read_bytes()
    with pytest.raises(KeyFileError, match="already exists"):
        save_key(make_key(), encrypted, PASSPHRASE, scrypt_n=FAST)
    assert encrypted.read_bytes() == before


def test_plain_only_on_request(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="explicitly"):
        save_key(make_key(), tmp_path / "a.key", None)
    with pytest.raises(KeyFileError, match="empty passphrase"):
        save_key(make_key(), tmp_path / "a.key", "", scrypt_n=FAST)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o622, 0o666])
def test_readable_by_others_is_refused(encrypted: Path, mode: int) -> None:
    encrypted.chmod(mode)
    with pytest.raises(KeyFileError, match="chmod 600"):
        load_key(encrypted, PASSPHRASE)


def test_wrong_passphrase(encrypted: Path) -> None:
    assert refusal(encrypted.read_bytes(), "wrong").startswith("wrong passphrase")


def test_passphrase_form_does_not_matter(tmp_path: Path) -> None:
    save_key(make_key(), tmp_path / "a.key", "Schl\u00fcssel", scrypt_n=FAST)
    assert load_key(tmp_path / "a.key", "Schlu\u0308ssel") == make_key()


@pytest.mark.parametrize("plain", [False, True])
def test_truncated_at_every_64th_byte(plain: bool) -> None:
    data = seal(golden_key(), PASSPHRASE, plain=plain, scrypt_n=FAST)
    for size in [*range(0, len(data), 64), len(data) - 1]:
        assert any(word in refusal(data[:size]) for word in ("not a key file", "truncated"))
    assert "too long" in refusal(data + b"x")


@pytest.mark.parametrize("plain", [False, True])
def test_every_flipped_bit_is_noticed(plain: bool) -> None:
    data = seal(make_key(), PASSPHRASE, plain=plain, scrypt_n=2)
    header = data.index(b"\n") + 1
    places = [*range(header), *range(header, len(data), 41), len(data) - 1]
    for place in places:
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            with pytest.raises(KeyFileError) as caught:
                unseal(bytes(flipped), PASSPHRASE)
            assert "\n" not in str(caught.value)


def test_future_version() -> None:
    line, _, body = seal(golden_key(), PASSPHRASE, scrypt_n=FAST).partition(b"\n")
    header = {**json.loads(line), "version": 2}
    assert "update pathmark" in refusal(canonical(header) + b"\n" + body)


@pytest.mark.parametrize("junk", [b"", b"\n", b"PK\x03\x04", b"{}\n", b"[1]\n", b"\xff" * 5000, b'{"a":' * 900])
def test_not_a_key(junk: bytes) -> None:
    assert "not a key file" in refusal(junk)


@pytest.mark.parametrize(
    "kdf",
    [
        {"n": 1 << 40}, {"n": 1 << 20, "r": 32}, {"n": 1000}, {"n": 0}, {"n": -2}, {"n": True}, {"n": "8"},
        {"r": 1 << 20}, {"p": 1 << 20}, {"salt": "zz" * 16}, {"salt": ""}, {"name": "md5"}, {"n": 1e5},
    ],
)  # fmt: skip
def test_hostile_headers_cost_nothing(kdf: dict[str, object]) -> None:
    line, _, body = seal(golden_key(), PASSPHRASE, scrypt_n=FAST).partition(b"\n")
    header = json.loads(line)
    header["kdf"].update(kdf)
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    assert "damaged header" in refusal(text + b"\n" + body)


def resealed(key: OwnerKey, change: object) -> bytes:
    """A plain key file whose record was altered by somebody who knows how to compute the checksum."""
    import hashlib
    import struct

    record = key.record()
    change(record)  # type: ignore[operator]
    text = canonical(record)
    body = struct.pack(">Q", len(text)) + text + b"".join(key.attachments[n] for n in sorted(key.attachments))
    header = {"format": "pathmark-key", "version": 1, "cipher": "none", "size": len(body)}
    digest = hashlib.sha256(canonical(header) + b"\n" + body).hexdigest()
    return canonical({**header, "sha256": digest}) + b"\n" + body


def _set(path: str, value: object):
    def change(record: dict) -> None:
        *way, last = path.split(".")
        for step in way:
            record = record[int(step) if step.isdigit() else step]
        record[int(last) if last.isdigit() else last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("watermarks.0.path", [[0, 1]] * 6, "path of watermark 0"),
        ("watermarks.0.id", "5", "path of watermark 0"),
        ("watermarks.1.claim.subkey", "00" * 32, "subkey of watermark 1"),
        ("watermarks.0.claim.layers.2.block", list(range(58)), "blocks of watermark 0"),
        ("watermarks.0.claim.layers.2.pool", list(range(59)), "contradicts itself"),
        ("watermarks.0.claim.triggers.0.trigger.choices.0", 3, "trigger 0 of watermark 0"),
        ("watermarks.1.claim.triggers.1.mark.attempt", 2, "mark 1 of watermark 1"),
        ("watermarks.0.id", str(10**30), "contradicts itself"),
        ("watermarks", [], "number of watermarks"),
        ("secret", "00" * 32, "subkey of watermark 0"),
        ("secret", "not hex", "malformed"),
        ("history.0.2", "00" * 32, "attachments"),
        ("history.0.3", 10**12, "malformed"),
        ("model.routed", [[0, 60]], "malformed"),
        ("model", None, "malformed"),
    ],
)
def test_altered_records_are_noticed(path: str, value: object, said: str) -> None:
    assert said in refusal(resealed(golden_key(), _set(path, value)), no_passphrase)


def test_a_plain_key_in_the_place_of_an_encrypted_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = seal(golden_key(), None, plain=True)
    assert "is not encrypted" in refusal(plain, PASSPHRASE)
    monkeypatch.setenv("PATHMARK_PASSPHRASE", PASSPHRASE)
    assert "is not encrypted" in refusal(plain, None)
    assert unseal(plain, no_passphrase) == golden_key()


def test_unaltered_record_opens() -> None:
    assert unseal(resealed(golden_key(), lambda record: None), None) == golden_key()


def test_amend_adds_a_revision(encrypted: Path) -> None:
    key = load_key(encrypted, PASSPHRASE)
    amend_key(encrypted, key.attach("profiles.npz", b"\0" * 1000), PASSPHRASE)
    later = load_key(encrypted, PASSPHRASE)
    assert (later.revision, later.attachments["profiles.npz"]) == (2, b"\0" * 1000)
    assert stat.S_IMODE(encrypted.stat().st_mode) == 0o600
    with pytest.raises(KeyFileError, match="amended by somebody else"):
        amend_key(encrypted, key.attach("other", b"1"), PASSPHRASE)
    with pytest.raises(KeyFileError, match="holds key"):
        amend_key(encrypted, make_key(secret=b"1" * 32), PASSPHRASE)
    with pytest.raises(KeyFileError, match="another id"):
        amend_key(encrypted, later.with_id(7), PASSPHRASE)
    assert load_key(encrypted, PASSPHRASE) == later


def test_rotate(encrypted: Path) -> None:
    rotate_passphrase(encrypted, PASSPHRASE, "new one", scrypt_n=FAST)
    assert load_key(encrypted, "new one") == golden_key()
    with pytest.raises(KeyFileError, match="wrong passphrase"):
        load_key(encrypted, PASSPHRASE)


def test_passphrase_from_the_environment(encrypted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATHMARK_PASSPHRASE", PASSPHRASE)
    assert load_key(encrypted) == golden_key()
    monkeypatch.delenv("PATHMARK_PASSPHRASE")
    with pytest.raises(KeyFileError, match="PATHMARK_PASSPHRASE"):
        load_key(encrypted)


def test_concurrent_amendments_lose_nothing(encrypted: Path) -> None:
    """Of two that amend the same revision at once one wins, and the other is told."""
    key = load_key(encrypted, PASSPHRASE)
    outcomes: list[str] = []

    def amend(name: str) -> None:
        try:
            amend_key(encrypted, key.attach(name, b"x"), PASSPHRASE)
            outcomes.append("done")
        except KeyFileError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=amend, args=(f"part{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("done") == 1
    assert sum("amended by somebody else" in said for said in outcomes) == 5
    assert load_key(encrypted, PASSPHRASE).revision == 2


def test_missing_and_odd_files(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="No such file"):
        load_key(tmp_path / "none.key")
    with pytest.raises(KeyFileError):
        load_key(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(KeyFileError, match="not a file"):
        load_key(tmp_path / "pipe")
    with pytest.raises(KeyFileError, match="cannot write"):
        save_key(make_key(), tmp_path / "no" / "a.key", None, plain=True)


def test_nothing_secret_in_representations() -> None:
    key = golden_key()
    mark = key.watermarks[0]
    shown = " ".join(
        f"{thing!r} {thing!s} {thing}"
        for thing in (
            key,
            key.secret,
            mark,
            mark.subkey,
            mark.triggers,
            mark.triggers[0].mark,
            vars(key)["secret"],
        )
    ).encode()
    assert not any(form in shown for form in secret_forms(key))
    for thing in (key, key.secret, mark, {"nested": [key]}):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(thing)
    assert copy.deepcopy(key) is key
    assert copy.copy(key.secret) is key.secret
