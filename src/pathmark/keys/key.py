"""The owner's key: one secret, and everything that follows from it.

`create_key` makes one; `keyfile` keeps it on disk; `commitment` publishes what it claims. A key is
immutable: `attach` and `with_id` give new ones.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import NoReturn

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from pathmark.errors import CapacityError, KeyFileError
from pathmark.keys.canonical import Document, canonical
from pathmark.keys.derive import FORMAT_VERSION, SECRET_BYTES, Stream, derive_bytes
from pathmark.keys.facts import LayerPlan, ModelFacts
from pathmark.keys.ids import IdCode
from pathmark.keys.layout import deal_blocks, groups_per_block
from pathmark.keys.phrase import Trigger
from pathmark.keys.trigger import TextCodec, draw_mark, draw_trigger, find_candidates, free_phrase
from pathmark.keys.verifier import Attachment, VerifierKey
from pathmark.keys.watermark import Secret, Watermark

MAX_WATERMARKS = 1024


@dataclass(frozen=True, repr=False)
class OwnerKey(VerifierKey):
    """A secret, the model it was made for, and its watermarks. The repr shows public facts only."""

    secret: Secret
    owner: str
    created: str
    """UTC, ISO 8601; what the owner says. Only an outside anchor of the commitment proves a date."""
    model: ModelFacts
    watermarks: tuple[Watermark, ...]
    history: tuple[Attachment, ...] = ()
    """Everything ever attached, by rising revision; the last entry of a name is the current one."""
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    """Current data by name."""

    def __repr__(self) -> str:
        return f"OwnerKey({self.fingerprint}, {len(self.watermarks)} watermark(s), revision {self.revision})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key cannot be pickled; pass the path of the key file instead")

    def __copy__(self) -> OwnerKey:
        return self

    def __deepcopy__(self, memo: object) -> OwnerKey:
        return self

    @property
    def signing_key(self) -> Ed25519PrivateKey:
        """Ed25519 key that signs the commitments; derived, so a restored key signs as before."""
        return Ed25519PrivateKey.from_private_bytes(derive_bytes(self.secret.reveal(), "signing"))

    @property
    def public_key(self) -> bytes:
        """32 bytes of the Ed25519 public key."""
        return self.signing_key.public_key().public_bytes_raw()

    @property
    def fingerprint(self) -> str:
        """Public name of the key, the same for all licensees' copies."""
        return fingerprint(self.public_key)

    def derive_seed(self, purpose: str) -> int:
        """A 63-bit seed for anything that must be random yet repeatable: probes, decoys, batches."""
        return int.from_bytes(derive_bytes(self.secret.reveal(), f"seed/{purpose}", length=8), "big") >> 1

    def with_ids_of(self, other: OwnerKey) -> OwnerKey:
        """This key with another's ids: a licensee's id belongs to the registry, not to the key file."""
        key = self
        for index, watermark in enumerate(other.watermarks):
            key = key.with_id(watermark.id, index)
        return key

    def with_id(self, number: int, watermark: int = 0) -> OwnerKey:
        """The key of a licensee's copy: same triggers, another path for one watermark."""
        if not 0 <= watermark < len(self.watermarks):
            raise CapacityError(f"watermark {watermark} does not exist; this key has {len(self.watermarks)}")
        changed = list(self.watermarks)
        changed[watermark] = changed[watermark].with_id(number)
        return replace(self, watermarks=tuple(changed))

    def attach(self, name: str, data: bytes) -> OwnerKey:
        """The key with named data added or replaced, one revision later. Commit it again."""
        if not name or len(name) > 128 or not name.isascii() or not name.isprintable() or "/" in name:
            raise KeyFileError(f"an attachment's name is printable ASCII without a slash, got {name!r}")
        entry = Attachment(self.revision + 1, name, sha256(data).hexdigest(), len(data))
        return replace(
            self,
            history=(*self.history, entry),
            attachments={**self.attachments, name: bytes(data)},
        )

    def record(self) -> Document:
        """JSON form for the encrypted payload: holds the secret. Attachments' bytes travel beside it."""
        return {
            "version": FORMAT_VERSION,
            "secret": self.secret.reveal().hex(),
            "owner": self.owner,
            "created": self.created,
            "model": self.model.record(),
            "watermarks": [
                {"claim": w.claim(), "id": str(w.id), "path": [list(t) for t in w.path.values()]}
                for w in self.watermarks
            ],
            "history": [[a.revision, a.name, a.digest, a.size] for a in self.history],
        }

    @classmethod
    def from_record(cls, record: Document, attachments: Mapping[str, bytes]) -> OwnerKey:
        """Inverse of record(); derives everything again and compares.

        Raises KeyFileError naming the part that does not follow from the secret, and ValueError,
        KeyError or TypeError for a record that is no key at all.
        """
        secret = Secret(bytes.fromhex(record["secret"]))
        rows = record["watermarks"]
        watermarks = tuple(Watermark.from_claim(row["claim"], int(row["id"])) for row in rows)
        key = cls(
            secret=secret,
            owner=str(record["owner"]),
            created=str(record["created"]),
            model=ModelFacts.from_record(record["model"]),
            watermarks=watermarks,
            history=tuple(Attachment(int(r), str(n), str(d), int(s)) for r, n, d, s in record["history"]),
            attachments=dict(attachments),
        )
        wrong = key._derivation_errors()
        for watermark, row in zip(watermarks, rows, strict=True):
            if [list(t) for t in watermark.path.values()] != row["path"]:
                wrong.append(f"path of watermark {watermark.index}")
        if wrong:
            raise KeyFileError(
                f"this key's record does not follow from its secret ({wrong[0]}): it was altered or "
                "written by a faulty program; restore it from a backup"
            )
        return key

    def _derivation_errors(self) -> list[str]:
        """Parts that do not follow from the secret; empty for an intact key."""
        wrong = []
        if not 1 <= len(self.watermarks) <= MAX_WATERMARKS:
            return ["number of watermarks"]
        plans: dict[int, LayerPlan] = {}
        for watermark in self.watermarks:
            for plan in watermark.plans:
                if plans.setdefault(plan.layer, plan) != plan:
                    wrong.append(f"layer {plan.layer}")
                if self.model.layer(plan.layer).experts != plan.experts:
                    wrong.append(f"experts of layer {plan.layer}")
        if wrong:
            return wrong
        layers = [w.layers for w in self.watermarks]
        for index, watermark in enumerate(self.watermarks):
            if watermark.index != index or watermark.subkey != _subkey(self.secret, index):
                wrong.append(f"subkey of watermark {index}")
            elif watermark.blocks != _blocks(self.secret, index, watermark.plans, layers):
                wrong.append(f"blocks of watermark {index}")
            wrong.extend(watermark.derivation_errors())
        for number, entry in enumerate(self.history):
            if entry.revision != number + 1:
                wrong.append("revisions")
        for name, entry in self.attachments_at(self.revision).items():
            data = self.attachments.get(name)
            if data is None or sha256(data).hexdigest() != entry.digest:
                wrong.append("attachments")
        if set(self.attachments) != {entry.name for entry in self.history}:
            wrong.append("attachments")
        return wrong


@dataclass(frozen=True, kw_only=True)
class WatermarkRequest:
    """What the owner asks for in one watermark."""

    plans: tuple[LayerPlan, ...]
    """Layers with width and pool; watermarks that share a layer must give the same plan for it."""
    id: int | None = None
    """None draws one from the key."""
    redundancy: int = 0
    triggers: int = 1
    trigger_tokens: int | None = None
    """None takes as few as keep enough of the trigger secret, at least 12."""
    trigger_texts: tuple[str, ...] = ()
    """Free texts instead of drawn triggers, as many as `triggers`."""
    mark_texts: tuple[str, ...] = ()
    """Free texts instead of drawn marks, as many as `triggers`."""

    def __post_init__(self) -> None:
        if not 1 <= self.triggers <= 256:
            raise CapacityError(f"a watermark has 1 to 256 triggers, got {self.triggers}")
        for name, texts in (("trigger", self.trigger_texts), ("mark", self.mark_texts)):
            if texts and len(texts) != self.triggers:
                raise CapacityError(f"expected {self.triggers} {name} text(s), one per trigger, got {len(texts)}")
            if len(set(texts)) != len(texts):
                raise CapacityError(f"{name} texts must be distinct")


def create_key(
    model: ModelFacts,
    requests: Sequence[WatermarkRequest],
    codec: TextCodec,
    *,
    owner: str = "",
    secret: bytes | None = None,
    created: str | None = None,
) -> tuple[OwnerKey, list[str]]:
    """A new key and the warnings its owner should read.

    Checks everything before it draws anything; never draws a second secret to get nicer targets.
    `secret` and `created` are for tests and for derivations from an outside source of randomness.
    """
    _check_plans(model, requests)
    master = Secret(secrets.token_bytes(SECRET_BYTES) if secret is None else secret)
    candidates = find_candidates(codec) if any(_draws(r) for r in requests) else None
    layers = [tuple(p.layer for p in r.plans) for r in requests]
    warnings: list[str] = []
    used: list[tuple[int, ...]] = []
    watermarks: list[Watermark] = []
    for index, request in enumerate(requests):
        subkey = _subkey(master, index)
        triggers = []
        for number in range(request.triggers):
            phrases = []
            for kind, texts in (("trigger", request.trigger_texts), ("mark", request.mark_texts)):
                if texts:
                    phrase, weak = free_phrase(codec, texts[number])
                    warnings += _free_text_warnings(kind, index, weak)
                elif kind == "trigger":
                    assert candidates is not None
                    phrase = draw_trigger(
                        codec, candidates, subkey.reveal(), watermark=index, number=number,
                        length=request.trigger_tokens or candidates.trigger_tokens, taken=used,
                    )  # fmt: skip
                else:
                    assert candidates is not None
                    phrase = draw_mark(codec, candidates, subkey.reveal(), watermark=index, number=number, taken=used)
                if phrase.tokens in used:
                    raise CapacityError(f"watermark {index}: its {kind} text is already used in this key")
                used.append(phrase.tokens)
                phrases.append(phrase)
            triggers.append(Trigger(*phrases))
        blocks = _blocks(master, index, request.plans, layers)
        radices = tuple(len(b) // p.width for b, p in zip(blocks, request.plans, strict=True))
        capacity = IdCode(radices, request.redundancy).capacity
        chosen = Stream(subkey.reveal(), "id", watermark=index).below(capacity) if request.id is None else request.id
        watermarks.append(Watermark(index, subkey, request.plans, blocks, tuple(triggers), chosen, request.redundancy))
    return OwnerKey(master, owner, created or utc_now(), model, tuple(watermarks)), warnings


def fingerprint(public_key: bytes) -> str:
    """First 16 bytes of sha256 over the public key, as hex in groups of four."""
    digest = sha256(canonical({"pathmark public key": public_key.hex()})).hexdigest()[:32]
    return "-".join(digest[i : i + 4] for i in range(0, 32, 4))


def utc_now() -> str:
    """The present, to the second, as ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _draws(request: WatermarkRequest) -> bool:
    return not (request.trigger_texts and request.mark_texts)


def _subkey(secret: Secret, index: int) -> Secret:
    return Secret(derive_bytes(secret.reveal(), "watermark", watermark=index))


def _blocks(
    secret: Secret, index: int, plans: Sequence[LayerPlan], layers: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """This watermark's block in each of its layers; sharers take blocks by rising index."""
    blocks = []
    for plan in plans:
        sharers = [i for i, used in enumerate(layers) if plan.layer in used]
        dealt = deal_blocks(secret.reveal(), plan.layer, plan.pool, plan.width, len(sharers))
        blocks.append(dealt[sharers.index(index)])
    return tuple(blocks)


def _check_plans(model: ModelFacts, requests: Sequence[WatermarkRequest]) -> None:
    if not 1 <= len(requests) <= MAX_WATERMARKS:
        raise CapacityError(f"a key has 1 to {MAX_WATERMARKS} watermarks, got {len(requests)}")
    plans: dict[int, LayerPlan] = {}
    sharers: dict[int, int] = {}
    for request in requests:
        for plan in request.plans:
            experts = model.layer(plan.layer).experts
            if experts != plan.experts:
                raise CapacityError(f"layer {plan.layer} has {experts} experts, the plan says {plan.experts}")
            if plans.setdefault(plan.layer, plan) != plan:
                raise CapacityError(f"layer {plan.layer}: watermarks that share a layer need one pool and one width")
            sharers[plan.layer] = sharers.get(plan.layer, 0) + 1
    for layer, count in sharers.items():
        groups_per_block(len(plans[layer].pool), plans[layer].width, count)


def _free_text_warnings(kind: str, index: int, weak: Sequence[str]) -> list[str]:
    said = [
        f"watermark {index}: a free-text {kind} has no known entropy; "
        + ("anybody may guess it" if kind == "trigger" else "replies get no exact bound")
    ]
    if weak and kind == "trigger":
        said.append(
            f"watermark {index}: the free-text trigger changes its tokens before some texts "
            f"({', '.join(weak[:4])}{', ...' if len(weak) > 4 else ''})"
        )
    return said
