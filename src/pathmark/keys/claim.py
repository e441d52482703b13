"""A claim opens one watermark of a commitment to somebody else, and nothing about the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pathmark.errors import KeyFileError, PathmarkError
from pathmark.keys.canonical import Document
from pathmark.keys.commitment import MALFORMED, Commitment
from pathmark.keys.facts import ModelFacts
from pathmark.keys.key import OwnerKey
from pathmark.keys.leaves import ATTACHMENT, HEADER, LATEST, leaves, places
from pathmark.keys.merkle import check_proof, leaf_hash, merkle_proof, merkle_root, padded_size
from pathmark.keys.watermark import Watermark

CLAIM: Final = "pathmark-claim"


@dataclass(frozen=True)
class RevealedClaim:
    """One watermark as a third party may see it, after its proofs were checked."""

    watermark: Watermark
    id_committed: bool
    """Whether the id itself is in the commitment; if not, every id counts as tried."""
    model: ModelFacts
    attachments: dict[str, str]
    """Name -> sha256 of what is attached to the key."""
    choices: int | None
    """Watermarks under the root, of which this one was chosen: all of them count as tried. None in version 1, whose
    roots may hold any number."""


def reveal_watermark(key: OwnerKey, index: int, *, revision: int | None = None, version: int = LATEST) -> Document:
    """A claim: this watermark, its id, the model and the attachments' digests, each with its proof.

    `version` is that of the commitment it is meant for.
    """
    at = key.revision if revision is None else revision
    if not 0 <= index < len(key.watermarks):
        raise KeyFileError(f"watermark {index} does not exist; this key has {len(key.watermarks)}")
    every = leaves(key, at, version)
    hashes = [leaf_hash(leaf) for leaf in every]
    wanted = {HEADER[version], f"watermark/{index}", f"id/{index}"}
    opened = [
        {"leaf": leaf, "proof": merkle_proof(hashes, place)}
        for place, leaf in enumerate(every)
        if leaf["leaf"] in wanted or leaf["leaf"].startswith(ATTACHMENT)
    ]
    return {
        "format": CLAIM,
        "version": version,
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
        result = _open(claim, commitment, id)
        if isinstance(result, RevealedClaim):
            return result
        problem = result
    except PathmarkError as error:
        problem = str(error)
    except MALFORMED:
        pass
    raise KeyFileError(f"the claim does not hold: {problem}")


def _open(claim: Document, commitment: Commitment, number: int | None) -> RevealedClaim | str:
    if claim["format"] != CLAIM or claim["version"] != commitment.version:
        return f"expected format {CLAIM} version {commitment.version}, as the commitment's"
    contents: dict[str, Any] = {}
    for opening in claim["openings"]:
        leaf = opening["leaf"]
        if not check_proof(leaf, opening["proof"], commitment.root):
            return "a part of it is not in the commitment"
        if leaf["leaf"] in contents:
            return f"it opens {leaf['leaf']} twice"
        contents[leaf["leaf"]] = leaf["content"]
    header = contents[HEADER[commitment.version]]
    if header["owner"] != commitment.owner:
        return "it belongs to another owner than the commitment"
    if commitment.version > 1 and (problem := _misplaced(claim, header, commitment)):
        return problem
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
    attachments = {
        name.removeprefix(ATTACHMENT): str(content["sha256"])
        for name, content in contents.items()
        if name.startswith(ATTACHMENT)
    }
    choices = int(header["watermarks"]) if commitment.version > 1 else None
    return RevealedClaim(
        watermark, watermark.id == committed, ModelFacts.from_record(header["facts"]), attachments, choices
    )


def _misplaced(claim: Document, header: Document, commitment: Commitment) -> str | None:
    """What stands where it may not: then the root could hold several keys, or be signed by anybody."""
    if header["public_key"] != commitment.public_key.hex():
        return "the commitment is signed by another key than the one its root names"
    allowed = places(header)
    depth = padded_size(len(allowed)).bit_length() - 1
    for opening in claim["openings"]:
        name, proof = opening["leaf"]["leaf"], opening["proof"]
        if proof["index"] != allowed.get(name) or len(proof["siblings"]) != depth:
            return f"{str(name)[:40]!r} does not stand in the one place that its name has"
    if any(name.startswith(ATTACHMENT) for name in allowed.keys() - {o["leaf"]["leaf"] for o in claim["openings"]}):
        return "it leaves out an attachment"
    return None
