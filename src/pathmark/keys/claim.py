"""A claim opens one watermark of a commitment to somebody else, and nothing about the others."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from pathmark.errors import KeyFileError, PathmarkError
from pathmark.keys.canonical import Document
from pathmark.keys.commitment import MALFORMED, Commitment, load_commitment, load_public
from pathmark.keys.facts import ModelFacts
from pathmark.keys.key import OwnerKey
from pathmark.keys.leaves import ATTACHMENT, HEADER, LATEST, leaves, places
from pathmark.keys.merkle import check_proof, leaf_hash, merkle_proof, merkle_root, padded_size
from pathmark.keys.verifier import Attachment, VerifierKey
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
    attached: Mapping[str, bytes] = field(default_factory=dict)
    """The attachments that came along with the claim, as they were committed."""


@dataclass(frozen=True, repr=False)
class ClaimedKey(VerifierKey):
    """One opened watermark in the place of a key: all that somebody needs who looks for it without the secret."""

    model: ModelFacts
    watermarks: tuple[Watermark, ...]
    """The opened one."""
    history: tuple[Attachment, ...]
    attachments: Mapping[str, bytes]
    """What came along with the claim."""
    committed: Mapping[str, str]
    """Name -> sha256 of everything that was attached, whether it came along or not."""
    choices: int | None
    """Watermarks under the root, of which this one was chosen; None where nobody knows."""
    commitment: Commitment
    """The one that the claim opens."""

    def __repr__(self) -> str:
        return f"ClaimedKey({self.fingerprint}, {self.watermarks[0]!r})"

    @property
    def fingerprint(self) -> str:
        """Public name of the key that was committed."""
        return self.commitment.fingerprint

    def derive_seed(self, purpose: str) -> int:
        """From the commitment, which everybody has: an arbiter and a second one get the same."""
        return int.from_bytes(sha256(self.commitment.root + purpose.encode()).digest()[:8], "big") >> 1


def open_claim(claim: Document | str | Path, commitment: Commitment | str | Path) -> ClaimedKey:
    """A claim as a key that `pathmark.verify` takes; raises KeyFileError unless the commitment holds it.

    Example:
        found = pathmark.verify("./suspect", pathmark.open_claim("claim.json", "owner.commitment.json"))
    """
    made = commitment if isinstance(commitment, Commitment) else load_commitment(commitment)
    document = load_public(Path(claim), "claim") if isinstance(claim, str | Path) else claim
    revealed = check_claim(document, made)
    return ClaimedKey(
        model=revealed.model,
        watermarks=(revealed.watermark,),
        history=tuple(
            Attachment(made.revision, name, revealed.attachments[name], len(data))
            for name, data in revealed.attached.items()
        ),
        attachments=revealed.attached,
        committed=revealed.attachments,
        choices=revealed.choices,
        commitment=made,
    )


def reveal_watermark(
    key: OwnerKey, index: int, *, revision: int | None = None, version: int = LATEST, bare: bool = False
) -> Document:
    """A claim: this watermark, its id, the model and the attachments' digests, each with its proof.

    The attachments themselves come along, unless it is to be `bare`: an arbiter needs them to recognise experts that
    were renumbered. `version` is that of the commitment it is meant for.
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
    now, then = key.attachments_at(key.revision), key.attachments_at(at)
    kept = [name for name in then if not bare and now[name] == then[name]]
    brought = {"attached": {name: base64.b64encode(key.attachments[name]).decode() for name in kept}} if kept else {}
    return {
        "format": CLAIM,
        "version": version,
        "fingerprint": key.fingerprint,
        "root": merkle_root(hashes).hex(),
        "watermark": index,
        "openings": opened,
        **brought,
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
    model = ModelFacts.from_record(header["facts"])
    if any(model.layer(plan.layer).experts != plan.experts for plan in watermark.plans):
        return "its layers are not those of the model that it names"
    attachments = {
        name.removeprefix(ATTACHMENT): str(content["sha256"])
        for name, content in contents.items()
        if name.startswith(ATTACHMENT)
    }
    attached = {name: base64.b64decode(data, validate=True) for name, data in claim.get("attached", {}).items()}
    for name, data in attached.items():
        if sha256(data).hexdigest() != attachments.get(name):
            return f"the attachment {name[:40]!r} is not the one that was committed"
    choices = int(header["watermarks"]) if commitment.version > 1 else None
    return RevealedClaim(watermark, watermark.id == committed, model, attachments, choices, attached)


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
