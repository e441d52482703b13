"""A statement that the owner signs: in-toto inside a DSSE envelope, Ed25519, one file.

The file has one form for one statement, so that no byte of it can change unnoticed.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from pathmark.errors import KeyFileError
from pathmark.keys.canonical import Document, canonical, parse_object
from pathmark.keys.key import OwnerKey, fingerprint

STATEMENT: Final = "https://in-toto.io/Statement/v1"
PAYLOAD: Final = "application/vnd.in-toto+json"
_MALFORMED: Final = (KeyError, TypeError, ValueError, IndexError, AttributeError, binascii.Error)


@dataclass(frozen=True)
class Attested:
    """A statement whose signature holds, and the public key that it holds by."""

    predicate: Document
    kind: str
    """Its predicate type."""
    name: str
    """What it is about ..."""
    sha256: str
    """... and the digest of that."""
    public_key: bytes

    @property
    def fingerprint(self) -> str:
        """Public name of the key that signed."""
        return fingerprint(self.public_key)


def attest(key: OwnerKey, kind: str, name: str, sha256: str, predicate: Document) -> bytes:
    """The file of a signed statement about one subject; the signer's public key becomes part of it."""
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": sha256}}],
        "predicateType": kind,
        "predicate": {**predicate, "public_key": key.public_key.hex()},
    }
    payload = canonical(statement)
    return _envelope(payload, key.signing_key.sign(pae(PAYLOAD, payload)), key.fingerprint)


def read_attestation(data: bytes, kind: str) -> Attested:
    """The statement in a file, or a KeyFileError unless its signature holds and every byte is as it was written."""
    try:
        envelope = parse_object(data) or {}
        payload, signature = (_decode(text) for text in (envelope["payload"], envelope["signatures"][0]["sig"]))
        statement = parse_object(payload) or {}
        predicate, (subject,) = statement["predicate"], statement["subject"]
        public_key = bytes.fromhex(predicate["public_key"])
        found = Attested(
            predicate,
            str(statement["predicateType"]),
            str(subject["name"]),
            str(subject["digest"]["sha256"]),
            public_key,
        )
        if _envelope(payload, signature, found.fingerprint) != data:
            raise KeyFileError("it has altered, missing or additional fields")
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, pae(PAYLOAD, payload))
    except InvalidSignature:
        raise KeyFileError("its signature does not hold: it was altered, or signed by another key") from None
    except KeyFileError:
        raise
    except _MALFORMED:
        raise KeyFileError("it is no signed statement; expected in-toto in a DSSE envelope") from None
    if statement["_type"] != STATEMENT or found.kind != kind:
        raise KeyFileError(f"it states something else; expected {kind}")
    return found


def pae(kind: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding: what is signed."""
    return b"DSSEv1 %d %s %d %s" % (len(kind.encode()), kind.encode(), len(payload), payload)


def _envelope(payload: bytes, signature: bytes, signer: str) -> bytes:
    document = {
        "payload": base64.b64encode(payload).decode("ascii"),
        "payloadType": PAYLOAD,
        "signatures": [{"keyid": signer, "sig": base64.b64encode(signature).decode("ascii")}],
    }
    return json.dumps(document, indent=1).encode("ascii") + b"\n"


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
