"""OpenTimestamps proofs: ours against the reference implementation's bytes, and against junk."""

from __future__ import annotations

import datetime
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from key_fixtures import golden_key, make_key
from opentimestamps.core.notary import BitcoinBlockHeaderAttestation, PendingAttestation
from opentimestamps.core.op import OpAppend, OpPrepend, OpSHA256
from opentimestamps.core.serialize import BytesSerializationContext
from opentimestamps.core.timestamp import DetachedTimestampFile, Timestamp

from pathmark.cli.main import cli
from pathmark.errors import KeyFileError
from pathmark.keys import commit_key, write_commitment
from pathmark.keys import opentimestamps as ours
from pathmark.keys.opentimestamps import BlockHeader, load_headers
from pathmark.keys.timestamps import existed_by, stamp

ROOT = "3ba3edfd7a7b12b27ac72c3e67768f617fc81bc3888a51323a9fb8aa4b1e5e4a"
GENESIS = bytes.fromhex(f"01000000{'00' * 32}{ROOT}29ab5f49ffff001d1dac2b7c")
MOMENT = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


@pytest.fixture(autouse=True)
def _little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "MIN_WORK", 2)


def block(merkle_root: bytes) -> bytes:
    """The header of a block with this root, made in a moment: a target that every second hash meets."""
    for nonce in range(1000):
        time = int(MOMENT.timestamp()).to_bytes(4, "little")
        raw = bytes(36) + merkle_root + time + bytes.fromhex("ffff7f20") + nonce.to_bytes(4, "little")
        if int.from_bytes(sha256(sha256(raw).digest()).digest(), "little") <= 0x7FFFFF << 8 * 29:
            return raw
    raise AssertionError


def proof(digest: bytes, *, anchored: bool = True) -> tuple[bytes, bytes]:
    """A proof as the reference implementation writes it, with a pending branch beside the finished one; its block."""
    start = Timestamp(digest)
    nonce = start.ops.add(OpAppend(b"n" * 16))
    hashed = nonce.ops.add(OpSHA256())
    hashed.attestations.add(PendingAttestation("https://calendar.example"))
    end = hashed.ops.add(OpPrepend(b"t" * 40)).ops.add(OpSHA256()).ops.add(OpAppend(b"s" * 32)).ops.add(OpSHA256())
    end.attestations.add(
        BitcoinBlockHeaderAttestation(900_000) if anchored else PendingAttestation("https://two.example")
    )
    context = BytesSerializationContext()
    DetachedTimestampFile(OpSHA256(), start).serialize(context)
    return context.getbytes(), block(end.msg)


def of(commitment) -> tuple[bytes, bytes]:
    return proof(sha256(commitment.statement).digest())


def test_a_block_dates_a_commitment() -> None:
    commitment = commit_key(golden_key())
    data, raw = of(commitment)
    stamped = stamp(commitment, data)
    assert existed_by(stamped, []) is None
    assert existed_by(stamped, [BlockHeader(block(bytes(32)))]) is None
    assert existed_by(stamped, [BlockHeader(raw)]) == MOMENT


def test_a_proof_of_something_else_or_of_nothing_yet_is_refused() -> None:
    commitment = commit_key(golden_key())
    with pytest.raises(KeyFileError, match="over something else"):
        stamp(commitment, of(commit_key(make_key(secret=b"x" * 32)))[0])
    with pytest.raises(KeyFileError, match="not in a block yet"):
        stamp(commitment, proof(sha256(commitment.statement).digest(), anchored=False)[0])


def test_every_altered_byte_is_noticed_or_means_nothing() -> None:
    commitment = commit_key(golden_key())
    data, raw = of(commitment)
    assert BlockHeader(raw).merkle_root in ours._roots(data, sha256(commitment.statement).digest())
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 0x20
        try:
            stamped = stamp(commitment, bytes(altered))
        except KeyFileError:
            continue
        assert existed_by(stamped, [BlockHeader(raw)]) in (None, MOMENT)  # the pending branch is nobody's business


def test_a_header_needs_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert BlockHeader(GENESIS).time == datetime.datetime(2009, 1, 3, 18, 15, 5, tzinfo=datetime.UTC)
    with pytest.raises(KeyFileError, match="too little work"):
        BlockHeader(GENESIS[:-1] + b"\x7d")
    monkeypatch.setattr(ours, "MIN_WORK", 1 << 75)
    with pytest.raises(KeyFileError, match="too little work"):
        BlockHeader(GENESIS)
    for content in (b"nothing", b"00" * 79, b"\xff" * 81):
        (tmp_path / "h").write_bytes(content)
        with pytest.raises(KeyFileError, match="80 bytes"):
            load_headers(tmp_path / "h")


@settings(max_examples=500, deadline=2000)
@given(st.binary(max_size=300), st.booleans())
def test_junk_is_no_proof(junk: bytes, opened: bool) -> None:
    digest = sha256(b"x").digest()
    with pytest.raises(KeyFileError):
        ours.check_proof((ours.MAGIC + b"\x01\x08" + digest if opened else ours.MAGIC) + junk + b"\xee", digest)


def test_depth_and_size_are_bounded() -> None:
    digest = sha256(b"x").digest()
    head = ours.MAGIC + b"\x01\x08" + digest
    end = b"\x00" + bytes.fromhex("0588960d73d71901") + b"\x01\x07"
    ours.check_proof(head + b"\x08" * 200 + end, digest)
    for endless in (b"\x08" * 300 + end, b"\xf3" * 12 + end, b"\xff" * 5000, b"\xf0\xff\xff\xff\xff\xff\x01"):
        with pytest.raises(KeyFileError, match="no whole"):
            ours.check_proof(head + endless, digest)


def test_on_the_command_line(tmp_path: Path) -> None:
    def run(*words: object) -> str:
        result = CliRunner().invoke(cli, [str(word) for word in words])
        assert result.exit_code == 0, result.output or result.exception
        return result.output

    commitment, file = commit_key(golden_key()), tmp_path / "c.json"
    write_commitment(commitment, file)
    data, raw = of(commitment)
    (tmp_path / "c.ots").write_bytes(data)
    (tmp_path / "headers.txt").write_text(f"{GENESIS.hex()}\n{raw.hex()}\n")
    run("commit", "--stamp", file, "--timestamp", tmp_path / "c.ots")
    assert "counts for nobody else" in run("commit", "--check", file)
    said = run("commit", "--check", file, "--block-headers", tmp_path / "headers.txt")
    assert "existed no later than 2026-01-02 03:04 UTC" in said
