"""What stands under a commitment's root: one salted leaf per part of a key, each in a place of its own.

Version 2: the first leaf, the *header*, names the owner, the signing key, the number of watermarks and all attachments;
every other leaf's place follows from its name and the header. So a root holds one key: nobody can keep two leaves of
one name under it and open whichever fits, and nobody else can sign it.

Version 1 had neither rule. Its commitments stay readable and say what they cannot prove.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from pathmark.errors import KeyFileError
from pathmark.keys.canonical import Document, canonical
from pathmark.keys.derive import derive_bytes
from pathmark.keys.key import MAX_WATERMARKS, OwnerKey
from pathmark.keys.merkle import leaf_hash, merkle_root, padded_size

LATEST: Final = 2
VERSIONS: Final = (1, LATEST)
HEADER: Final = {1: "model", 2: "header"}
"""Name of the first leaf."""
ATTACHMENT: Final = "attachment/"


def leaves(key: OwnerKey, revision: int, version: int) -> list[Document]:
    """All leaves of a revision in their order, padding included."""
    if not 0 <= revision <= key.revision:
        raise KeyFileError(f"revision {revision} does not exist; this key is at {key.revision}")
    attached = sorted(key.attachments_at(revision).items())
    header: Document = {"facts": key.model.record(), "owner": key.owner, "created": key.created}
    if version > 1:
        header |= {
            "public_key": key.public_key.hex(),
            "watermarks": len(key.watermarks),
            "attachments": [name for name, _ in attached],
        }
    contents: list[tuple[str, Document]] = [(HEADER[version], header)]
    contents += [(f"watermark/{w.index}", w.claim()) for w in key.watermarks]
    contents += [(f"id/{w.index}", {"id": str(w.id)}) for w in key.watermarks]
    contents += [(f"{ATTACHMENT}{name}", {"sha256": entry.digest, "size": entry.size}) for name, entry in attached]
    contents += [(f"padding/{i}", {}) for i in range(len(contents), padded_size(len(contents)))]
    return [_salted(key, name, content) for name, content in contents]


def root(key: OwnerKey, revision: int, version: int) -> bytes:
    """The Merkle root of a revision."""
    return merkle_root([leaf_hash(leaf) for leaf in leaves(key, revision, version)])


def places(header: Document) -> dict[str, int]:
    """Version 2: name -> place of every leaf that this header allows, padding apart."""
    count, attached = header["watermarks"], header["attachments"]
    if type(count) is not int or not 1 <= count <= MAX_WATERMARKS:
        raise ValueError("the header counts too many watermarks, or none")
    if attached != sorted({str(name) for name in attached}):
        raise ValueError("the header names an attachment twice")
    names = [HEADER[LATEST], *(f"watermark/{j}" for j in range(count)), *(f"id/{j}" for j in range(count))]
    names += [f"{ATTACHMENT}{name}" for name in attached]
    return {name: place for place, name in enumerate(names)}


def _salted(key: OwnerKey, name: str, content: Document) -> Document:
    # The content is part of the salt's name: opening one licensee's id must not help to guess another's.
    purpose = f"salt/{name}/{sha256(canonical(content)).hexdigest()}"
    return {"leaf": name, "content": content, "salt": derive_bytes(key.secret.reveal(), purpose).hex()}
