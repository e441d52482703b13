"""Commitments that are safe to publish.

A *key commitment* is the signed Merkle root over the model's facts, every watermark's claim, every id and the digests
of what was attached (`leaves`). A *release commitment* binds the same root to the sha256 of every file of a released
folder. The date inside is what the owner says; `timestamps` holds what somebody else says. `claim` opens one watermark.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from pathmark.errors import KeyFileError
from pathmark.keys.canonical import Document, canonical, parse_object
from pathmark.keys.key import OwnerKey, fingerprint, utc_now
from pathmark.keys.leaves import LATEST, VERSIONS, root
from pathmark.keys.release import Progress, ReleasedFile, compare_release, hash_release
from pathmark.keys.safefile import write_whole

COMMITMENT: Final = "pathmark-commitment"
_MAX_BYTES: Final = 1 << 26
MALFORMED: Final = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Commitment:
    """A commitment whose signature holds. Build with commit_key, commit_release or parse_commitment."""

    kind: str
    """`key` or `release`."""
    owner: str
    created: str
    """When the owner says it was made; UTC, ISO 8601."""
    public_key: bytes
    revision: int
    """Revision of the key: how many attachments it had."""
    root: bytes
    """Merkle root of that revision."""
    files: tuple[ReleasedFile, ...]
    """The released files; empty for a key commitment."""
    signature: bytes
    version: int = LATEST
    timestamps: tuple[bytes, ...] = ()
    """What others say of the date: RFC 3161 tokens over `statement`, checked by `timestamps.existed_by`."""

    @property
    def limits(self) -> list[str]:
        """What this commitment cannot prove to anybody else, in words."""
        if self.version == LATEST:
            return []
        return [
            "its format is version 1, which binds neither its signer nor the number of keys under its root: it dates "
            "nothing for a third party. Commit again with this version"
        ]

    @property
    def statement(self) -> bytes:
        """What a timestamp is put on: everything but the timestamps."""
        return canonical({**self._body(), "signature": self.signature.hex()})

    @property
    def fingerprint(self) -> str:
        """Public name of the key."""
        return fingerprint(self.public_key)

    @property
    def created_at(self) -> datetime.datetime:
        """The stated date, for comparison."""
        return datetime.datetime.fromisoformat(self.created)

    def signed_by(self, key: OwnerKey) -> Commitment:
        """The same with this key's signature under it."""
        bare = replace(self, public_key=key.public_key)
        return replace(bare, signature=key.signing_key.sign(_signed_bytes(bare)))

    def document(self) -> Document:
        """JSON form, to be published."""
        stamped = {"timestamps": [token.hex() for token in self.timestamps]} if self.timestamps else {}
        return {**self._body(), "signature": self.signature.hex(), **stamped}

    def _body(self) -> Document:
        body: Document = {
            "format": COMMITMENT,
            "version": self.version,
            "kind": self.kind,
            "owner": self.owner,
            "created": self.created,
            "fingerprint": self.fingerprint,
            "public_key": self.public_key.hex(),
            "revision": self.revision,
            "root": self.root.hex(),
        }
        if self.kind == "release":
            body["files"] = [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in self.files]
        return body


def commit_key(key: OwnerKey, *, created: str | None = None, revision: int | None = None) -> Commitment:
    """The signed key commitment of a revision, the present one by default."""
    return _signed(key, "key", created, key.revision if revision is None else revision, ())


def commit_release(
    key: OwnerKey, folder: Path, *, created: str | None = None, progress: Progress | None = None
) -> Commitment:
    """The signed commitment that binds the key to every file of a released folder."""
    return _signed(key, "release", created, key.revision, tuple(hash_release(folder, progress)))


def parse_commitment(document: Document) -> Commitment:
    """Read a published commitment; raises KeyFileError unless it is whole and its signature holds."""
    commitment = _read(document)
    if commitment is None:
        raise KeyFileError(f"not a readable commitment; expected format {COMMITMENT} version 1 or {LATEST}")
    if commitment.document() != document:
        raise KeyFileError("this commitment has altered, missing or additional fields")
    try:
        key = Ed25519PublicKey.from_public_bytes(commitment.public_key)
        key.verify(commitment.signature, _signed_bytes(commitment))
    except (InvalidSignature, ValueError):
        raise KeyFileError("the signature of this commitment does not hold: it was altered") from None
    return commitment


def load_commitment(path: Path | str) -> Commitment:
    """parse_commitment of a file."""
    return parse_commitment(load_public(Path(path), "commitment"))


def check_commitment(
    commitment: Commitment,
    key: OwnerKey | None = None,
    release: Path | None = None,
    *,
    progress: Progress | None = None,
) -> list[str]:
    """What does not hold, in words; empty if the commitment fits the key and the released folder."""
    problems = []
    if key is not None:
        if commitment.public_key != key.public_key:
            problems.append(f"made by key {commitment.fingerprint}, not by {key.fingerprint}")
        elif commitment.revision > key.revision:
            problems.append(f"made at revision {commitment.revision}; this key is at {key.revision}")
        elif root(key, commitment.revision, commitment.version) != commitment.root:
            problems.append("the key's watermarks, ids or attachments differ from what was committed")
        elif commitment.owner != key.owner:
            problems.append(f"owner is {commitment.owner!r}, the key says {key.owner!r}")
    if release is not None:
        if commitment.kind != "release":
            problems.append("a key commitment binds no files; expected a release commitment")
        else:
            problems += compare_release(commitment.files, release, progress)
    return problems


def load_public(path: Path, what: str) -> Document:
    """The JSON object in a public file, or a KeyFileError."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise KeyFileError(f"{path} is too large for a {what}")
        document = parse_object(path.read_bytes())
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None
    if document is None:
        raise KeyFileError(f"{path} is not a {what}: expected a JSON object")
    return document


def write_commitment(commitment: Commitment, path: Path, *, replacing: bool = False) -> None:
    """Write the public file, whole or not at all; an existing one is kept unless it is being stamped."""
    write_whole(path, json.dumps(commitment.document(), indent=1).encode("ascii") + b"\n", replacing=replacing)


def _signed_bytes(commitment: Commitment) -> bytes:
    return b"pathmark commitment %d\n" % commitment.version + canonical(commitment._body())


def _signed(
    key: OwnerKey, kind: str, created: str | None, revision: int, files: tuple[ReleasedFile, ...]
) -> Commitment:
    found = root(key, revision, LATEST)
    return Commitment(kind, key.owner, created or utc_now(), b"", revision, found, files, b"").signed_by(key)


def _read(document: Document) -> Commitment | None:
    try:
        if document["format"] != COMMITMENT or document["version"] not in VERSIONS:
            return None
        files = tuple(ReleasedFile(str(f["path"]), int(f["size"]), str(f["sha256"])) for f in document.get("files", ()))
        commitment = Commitment(
            kind=str(document["kind"]),
            owner=str(document["owner"]),
            created=str(document["created"]),
            public_key=bytes.fromhex(document["public_key"]),
            revision=int(document["revision"]),
            root=bytes.fromhex(document["root"]),
            files=files,
            signature=bytes.fromhex(document["signature"]),
            version=int(document["version"]),
            timestamps=tuple(bytes.fromhex(token) for token in document.get("timestamps", ())),
        )
        if commitment.created_at.tzinfo is None or len(commitment.root) != 32:
            return None
    except MALFORMED:
        return None
    return commitment if commitment.kind in ("key", "release") else None
