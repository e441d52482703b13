"""Signed statements and the digest of a model folder, against independent implementations of both formats."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest
from key_fixtures import golden_key

from pathmark.errors import KeyFileError
from pathmark.keys.attestation import attest, read_attestation
from pathmark.keys.modelroot import model_files, model_root, serialization, signature_statement
from pathmark.models.bundled import bundled_folder

KIND = "https://pathmark/evidence/v1"


def nested_model(folder):
    """Names that sort otherwise as texts than as paths, and what version control adds."""
    for name in ("config.json", "a-b/x", "a/x", "a/b/y", "a.json", ".gitattributes", ".git/HEAD"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_the_root_is_that_of_model_signing(tmp_path):
    import model_signing.hashing
    from model_signing._signing.signing import Payload

    for folder in (bundled_folder("bundled:tiny"), nested_model(tmp_path / "nested")):
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


def test_an_independent_reader_accepts_the_envelope():
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import SSlibKey

    key = golden_key()
    data = attest(key, KIND, "a model", "ab" * 32, {"files": []})
    signer = SSlibKey(key.fingerprint, "ed25519", "ed25519", {"public": key.public_key.hex()})
    envelope = Envelope.from_dict(json.loads(data))
    assert envelope.payload_type == "application/vnd.in-toto+json"
    assert envelope.verify([signer], 1).keys() == {key.fingerprint}
    statement = json.loads(envelope.payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"][0]["digest"]["sha256"] == read_attestation(data, KIND).sha256 == "ab" * 32


def test_every_byte_of_a_statement_counts():
    data = attest(golden_key(), KIND, "a model", "ab" * 32, {"files": []})
    assert read_attestation(data, KIND).name == "a model"
    for place in range(len(data)):
        for flipped in (1, 0x20, 0x80):
            changed = bytearray(data)
            changed[place] ^= flipped
            with pytest.raises(KeyFileError):
                read_attestation(bytes(changed), KIND)
    with pytest.raises(KeyFileError, match="something else"):
        read_attestation(data, "https://example.com/other")
