"""Receipts: a licensee's own signature under the row that names it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given, settings
from hypothesis import strategies as st
from key_fixtures import make_key

from pathmark.cli.main import cli
from pathmark.errors import KeyFileError
from pathmark.keys import Registry, save_key
from pathmark.keys.receipts import Receipt, load_receipt, load_signing_key, parse_receipt, write_receipt

LICENSEE = Ed25519PrivateKey.from_private_bytes(b"l" * 32)


@pytest.fixture
def book(tmp_path: Path) -> Registry:
    registry = Registry(tmp_path / "licensees.db")
    for name in ("Alpha", "Beta"):
        registry.issue(make_key(), name)
    return registry


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli, [str(word) for word in words])
    return result.exit_code, result.output or str(result.exception)


def test_from_issue_to_check_on_the_command_line(tmp_path: Path) -> None:
    save_key(make_key(), tmp_path / "master.key", None, plain=True)
    pem = LICENSEE.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "licensee.pem").touch(0o600)
    (tmp_path / "licensee.pem").write_bytes(pem)
    registry, receipt, signed = (tmp_path / name for name in ("licensees.db", "alpha.receipt", "alpha.signed"))
    words = ("issue", "--registry", registry, "--key", tmp_path / "master.key", "--licensee")
    assert run(*words, "Alpha", "--receipt", receipt)[0] == 0
    assert run("registry", "check", registry, "--receipt", receipt)[0] == 1  # nobody has countersigned it yet
    code, said = run("registry", "countersign", receipt, "--signing-key", tmp_path / "licensee.pem", "-o", signed)
    assert code == 0, said
    assert f"Alpha confirms that the copy with id {Registry(registry).entries()[0].id}" in said
    assert run(*words, "Beta")[0] == 0  # later rows change nothing
    code, said = run("registry", "check", registry, "--receipt", signed, "--json")
    assert code == 0, said
    assert json.loads(said)["countersigned"] == {"Alpha": load_receipt(signed).signer}


def test_a_row_that_was_moved_to_somebody_else_does_not_fit_the_receipt(book: Registry, tmp_path: Path) -> None:
    """The owner's own key can sign any row again; what the licensee signed stays."""
    write_receipt(Receipt(*book.row("Beta")).countersigned_by(LICENSEE), tmp_path / "beta.signed")
    other = Registry(tmp_path / "other.db")
    for name in ("Beta", "Alpha"):  # the same licensees, the other way round
        other.issue(make_key(), name)
    assert other.problems() == []
    code, said = run("registry", "check", other.path, "--receipt", tmp_path / "beta.signed")
    assert code == 1
    assert "another row than the registry's" in said
    with sqlite3.connect(other.path) as db:
        db.execute("DELETE FROM issued WHERE licensee = 'Beta'")
    assert "has no licensee 'Beta'" in run("registry", "check", other.path, "--receipt", tmp_path / "beta.signed")[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["row"].update(id="5"), "owner's signature"),
        (lambda d: d["row"].update(licensee="Gamma"), "owner's signature"),
        (lambda d: d.update(public_key="00" * 32), "owner's signature"),
        (lambda d: d.update(countersignature="00" * 64), "licensee's signature"),
        (lambda d: d.update(licensee_key="11" * 32), "licensee's signature"),
        (lambda d: d.update(more=1), "not a readable receipt"),
        (lambda d: d.update(row=[1]), "not a readable receipt"),
        (lambda d: d.pop("signature"), "not a readable receipt"),
    ],
)
def test_altered_receipts_are_refused(book: Registry, change, said: str) -> None:
    document = Receipt(*book.row("Alpha")).countersigned_by(LICENSEE).document()
    assert parse_receipt(json.loads(json.dumps(document))).countersigned
    change(document)
    with pytest.raises(KeyFileError, match=said):
        parse_receipt(document)


def test_an_owner_cannot_sign_for_a_licensee(book: Registry) -> None:
    """A countersignature says whose key made it: that of the owner is not the licensee's."""
    own = Receipt(*book.row("Alpha")).countersigned_by(make_key().signing_key)
    assert own.signer == make_key().fingerprint != Receipt(*book.row("Alpha")).countersigned_by(LICENSEE).signer


def test_a_signing_key_is_an_ed25519_pem(tmp_path: Path) -> None:
    (tmp_path / "k.pem").touch(0o600)
    (tmp_path / "k.pem").write_text("nothing")
    with pytest.raises(KeyFileError, match="openssl genpkey"):
        load_signing_key(tmp_path / "k.pem")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["format", "version", "public_key", "row", "signature", "licensee_key", "countersignature"])


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(NAMES, JSON))
def test_junk_is_no_receipt(document) -> None:
    with pytest.raises(KeyFileError):
        parse_receipt(document)
