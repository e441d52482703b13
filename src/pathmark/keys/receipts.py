"""A receipt: the row of a registry that names a licensee, signed by the owner and then by the licensee.

The owner's signature alone shows what the owner wrote down. With the licensee's signature under it, neither can later
say that the copy with this id went to somebody else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from pathmark.errors import KeyFileError
from pathmark.keys.canonical import Document, canonical
from pathmark.keys.commitment import MALFORMED, load_public
from pathmark.keys.key import fingerprint
from pathmark.keys.registry import ROW_SIGNED
from pathmark.keys.safefile import read_private, write_private

RECEIPT: Final = "pathmark-receipt"
VERSION: Final = 1


@dataclass(frozen=True)
class Receipt:
    """One row of a registry with the owner's signature, and the licensee's if there is one; both hold."""

    owner: bytes
    """The owner's public key."""
    row: Document
    """As the owner signed it: licensee, id, date, and the row before it."""
    signature: bytes
    """The owner's."""
    licensee: bytes = b""
    """The licensee's public key; empty until it is countersigned."""
    countersignature: bytes = b""

    @property
    def name(self) -> str:
        """The licensee's name in the row."""
        return str(self.row["licensee"])

    @property
    def countersigned(self) -> bool:
        """Whether the licensee has signed it."""
        return bool(self.countersignature)

    @property
    def signer(self) -> str:
        """Fingerprint of the licensee's key, to be compared with what the licensee says."""
        return fingerprint(self.licensee)

    def countersigned_by(self, key: Ed25519PrivateKey) -> Receipt:
        """The same with the licensee's signature under it."""
        bare = replace(self, licensee=key.public_key().public_bytes_raw(), countersignature=b"")
        return replace(bare, countersignature=key.sign(bare._statement()))

    def document(self) -> Document:
        """JSON form."""
        body: Document = {
            "format": RECEIPT,
            "version": VERSION,
            "public_key": self.owner.hex(),
            "row": self.row,
            "signature": self.signature.hex(),
        }
        if self.licensee:
            body |= {"licensee_key": self.licensee.hex(), "countersignature": self.countersignature.hex()}
        return body

    def _statement(self) -> bytes:
        return b"pathmark receipt 1\n" + canonical({**self.document(), "countersignature": ""})


def parse_receipt(document: Document) -> Receipt:
    """Read a receipt; raises KeyFileError unless it is whole and its signatures hold."""
    try:
        receipt = Receipt(
            owner=bytes.fromhex(document["public_key"]),
            row=dict(document["row"]),
            signature=bytes.fromhex(document["signature"]),
            licensee=bytes.fromhex(document.get("licensee_key", "")),
            countersignature=bytes.fromhex(document.get("countersignature", "")),
        )
        whole = receipt.document() == document and isinstance(receipt.row["licensee"], str)
        signed = ROW_SIGNED + canonical(receipt.row)
    except MALFORMED:
        whole = False
    if not whole:
        raise KeyFileError(f"not a readable receipt; expected format {RECEIPT} version {VERSION}, as `issue` writes it")
    _require(receipt.owner, receipt.signature, signed, "owner")
    if receipt.licensee:
        _require(receipt.licensee, receipt.countersignature, receipt._statement(), "licensee")
    return receipt


def load_receipt(path: Path) -> Receipt:
    """parse_receipt of a file."""
    return parse_receipt(load_public(path, "receipt"))


def write_receipt(receipt: Receipt, path: Path) -> None:
    """A new file, readable by its owner alone: it tells a licensee's id."""
    write_private(path, json.dumps(receipt.document(), indent=1).encode("ascii") + b"\n")


def load_signing_key(path: Path) -> Ed25519PrivateKey:
    """A licensee's Ed25519 key from a PEM file that only its owner may read."""
    try:
        key = load_pem_private_key(read_private(path, "a signing key"), None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFileError(
            f"{path} is no Ed25519 key in PEM without a password; make one with: openssl genpkey -algorithm ed25519"
        )
    return key


def _require(public: bytes, signature: bytes, signed: bytes, whose: str) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed)
    except (InvalidSignature, ValueError):
        raise KeyFileError(f"the {whose}'s signature under this receipt does not hold: it was altered") from None
