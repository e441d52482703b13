"""Commitments that are safe to publish, and claims that open one watermark of them.

A *key commitment* is the signed Merkle root over the model's facts, every watermark's claim, every id
and the digests of what was attached. A *release commitment* binds the same root to the sha256 of every
file of a released folder. The date inside is what the owner says; docs/disputes.md tells how to anchor
it outside. A *claim* reveals one watermark with its proof of inclusion, and nothing about the others.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from pathmark.errors import KeyFileError, PathmarkError
from pathmark.keys.canonical import Document, canonical, parse_object
from pathmark.keys.derive import FORMAT_VERSION, derive_bytes
from pathmark.keys.facts import ModelFacts
from pathmark.keys.key import OwnerKey, fingerprint, utc_now
from pathmark.keys.merkle import check_proof, leaf_hash, merkle_proof, merkle_root, padded_size
from pathmark.keys.release import Progress, ReleasedFile, compare_release, hash_release
from pathmark.keys.watermark import Watermark

COMMITMENT: Final = "pathmark-commitment"
CLAIM: Final = "pathmark-claim"
_SIGNED: Final = b"pathmark commitment 1\n"
_MAX_BYTES: Final = 1 << 26
_MALFORMED: Final = (ValueError, KeyError, TypeError, AttributeError, IndexError)


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

    @property
    def fingerprint(self) -> str:
        """Public name of the key."""
        return fingerprint(self.public_key)

    @property
    def created_at(self) -> datetime.datetime:
        """The stated date, for comparison."""
        return datetime.datetime.fromisoformat(self.created)

    def document(self) -> Document:
        """JSON form, to be published."""
        return {**self._body(), "signature": self.signature.hex()}

    def _body(self) -> Document:
        body: Document = {
            "format": COMMITMENT,
            "version": FORMAT_VERSION,
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


@dataclass(frozen=True)
class RevealedClaim:
    """One watermark as a third party may see it, after its proofs were checked."""

    watermark: Watermark
    id_committed: bool
    """Whether the id itself is in the commitment; if not, every id counts as tried."""
    model: ModelFacts
    attachments: dict[str, str]
    """Name -> sha256 of what is attached to the key."""


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
        raise KeyFileError(f"not a readable commitment; expected format {COMMITMENT} version {FORMAT_VERSION}")
    if commitment.document() != document:
        raise KeyFileError("this commitment has altered, missing or additional fields")
    try:
        key = Ed25519PublicKey.from_public_bytes(commitment.public_key)
        key.verify(commitment.signature, _SIGNED + canonical(commitment._body()))
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
        elif _root(key, commitment.revision) != commitment.root:
            problems.append("the key's watermarks, ids or attachments differ from what was committed")
        elif commitment.owner != key.owner:
            problems.append(f"owner is {commitment.owner!r}, the key says {key.owner!r}")
    if release is not None:
        if commitment.kind != "release":
            problems.append("a key commitment binds no files; expected a release commitment")
        else:
            problems += compare_release(commitment.files, release, progress)
    return problems


def reveal_watermark(key: OwnerKey, index: int, *, revision: int | None = None) -> Document:
    """A claim: this watermark, its id, the model and the attachments' digests, each with its proof."""
    at = key.revision if revision is None else revision
    if not 0 <= index < len(key.watermarks):
        raise KeyFileError(f"watermark {index} does not exist; this key has {len(key.watermarks)}")
    leaves = _leaves(key, at)
    hashes = [leaf_hash(leaf) for leaf in leaves]
    wanted = {"model", f"watermark/{index}", f"id/{index}"}
    opened = [
        {"leaf": leaf, "proof": merkle_proof(hashes, place)}
        for place, leaf in enumerate(leaves)
        if leaf["leaf"] in wanted or leaf["leaf"].startswith("attachment/")
    ]
    return {
        "format": CLAIM,
        "version": FORMAT_VERSION,
        "fingerprint": key.fingerprint,
        "root": merkle_root(hashes).hex(),
        "watermark": index,
        "openings": opened,
    }


def check_claim(claim: Document, commitment: Commitment, *, id: int | None = None) -> RevealedClaim:
    """Check a claim against a published commitment; raises KeyFileError unless everything holds.

    `id` asks about another id than the committed one, such as a licensee's.
    """
    problem = "it is malformed"
    try:
        result = _open_claim(claim, commitment, id)
        if isinstance(result, RevealedClaim):
            return result
        problem = result
    except PathmarkError as error:
        problem = str(error)
    except _MALFORMED:
        pass
    raise KeyFileError(f"the claim does not hold: {problem}")


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


def _open_claim(claim: Document, commitment: Commitment, number: int | None) -> RevealedClaim | str:
    if claim["format"] != CLAIM or claim["version"] != FORMAT_VERSION:
        return f"expected format {CLAIM} version {FORMAT_VERSION}"
    contents: dict[str, Any] = {}
    for opening in claim["openings"]:
        leaf = opening["leaf"]
        if not check_proof(leaf, opening["proof"], commitment.root):
            return "a part of it is not in the commitment"
        contents[leaf["leaf"]] = leaf["content"]
    index = int(claim["watermark"])
    stated = contents.get(f"id/{index}")
    committed = None if stated is None else int(stated["id"])
    if number is None and committed is None:
        return "it states no id"
    watermark = Watermark.from_claim(
        contents[f"watermark/{index}"], committed if number is None else number  # type: ignore[arg-type]
    )  # fmt: skip
    wrong = watermark.derivation_errors()
    if watermark.index != index or wrong:
        return f"{wrong[0] if wrong else 'its index'} does not follow from its subkey"
    prefix = "attachment/"
    attachments = {
        name[len(prefix) :]: str(content["sha256"]) for name, content in contents.items() if name.startswith(prefix)
    }
    if contents["model"]["owner"] != commitment.owner:  # anybody can sign a root that is already public
        return "it belongs to another owner than the commitment"
    model = ModelFacts.from_record(contents["model"]["facts"])
    return RevealedClaim(watermark, watermark.id == committed, model, attachments)


def _leaves(key: OwnerKey, revision: int) -> list[Document]:
    """All leaves of a revision in their order, padding included."""
    if not 0 <= revision <= key.revision:
        raise KeyFileError(f"revision {revision} does not exist; this key is at {key.revision}")
    facts = {"facts": key.model.record(), "owner": key.owner, "created": key.created}
    contents: list[tuple[str, Document]] = [("model", facts)]
    contents += [(f"watermark/{w.index}", w.claim()) for w in key.watermarks]
    contents += [(f"id/{w.index}", {"id": str(w.id)}) for w in key.watermarks]
    for name, entry in sorted(key.attachments_at(revision).items()):
        contents.append((f"attachment/{name}", {"sha256": entry.digest, "size": entry.size}))
    contents += [(f"padding/{i}", {}) for i in range(len(contents), padded_size(len(contents)))]
    return [_salted(key, name, content) for name, content in contents]


def _salted(key: OwnerKey, name: str, content: Document) -> Document:
    # The content is part of the salt's name: opening one licensee's id must not help to guess another's.
    purpose = f"salt/{name}/{sha256(canonical(content)).hexdigest()}"
    return {"leaf": name, "content": content, "salt": derive_bytes(key.secret.reveal(), purpose).hex()}


def _root(key: OwnerKey, revision: int) -> bytes:
    return merkle_root([leaf_hash(leaf) for leaf in _leaves(key, revision)])


def _signed(
    key: OwnerKey, kind: str, created: str | None, revision: int, files: tuple[ReleasedFile, ...]
) -> Commitment:
    unsigned = Commitment(
        kind, key.owner, created or utc_now(), key.public_key, revision, _root(key, revision), files, b""
    )
    signature = key.signing_key.sign(_SIGNED + canonical(unsigned._body()))
    return Commitment(**{**vars(unsigned), "signature": signature})


def _read(document: Document) -> Commitment | None:
    try:
        if document["format"] != COMMITMENT or document["version"] != FORMAT_VERSION:
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
        )
        if commitment.created_at.tzinfo is None or len(commitment.root) != 32:
            return None
    except _MALFORMED:
        return None
    return commitment if commitment.kind in ("key", "release") else None
