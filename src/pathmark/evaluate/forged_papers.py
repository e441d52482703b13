"""Forged papers: claims, commitments, dates and registries that somebody altered, copied or made up.

Each is read as an arbiter reads it. All are as convincing as can be: at face value they have the p-value of a mark that
is really there, and the forger's own commitment really was seen before the suspect.
"""

from __future__ import annotations

import copy
import datetime
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from pathmark.errors import PathmarkError
from pathmark.evaluate.dispute import SIGNIFICANCE, read_claim
from pathmark.evaluate.forgery import Forgery
from pathmark.keys import Commitment, OwnerKey, Registry, commit_key, parse_commitment, reveal_watermark
from pathmark.keys.canonical import Document
from pathmark.keys.leaves import LATEST, leaves, root
from pathmark.keys.merkle import leaf_hash, merkle_proof, merkle_root
from pathmark.keys.receipts import Receipt, parse_receipt
from pathmark.stats import PValue
from pathmark.verification import Anchor, judge_anchor

ATTACHED = "profiles.npz"


@dataclass(frozen=True, eq=False)
class Court:
    """Who is before the arbiter, and on which days what was seen."""

    owner: OwnerKey
    thief: OwnerKey
    """Really committed to on the day `seen`, where nothing else is said."""
    p: PValue
    """What each claim reaches at face value."""
    seen: datetime.date
    published: datetime.date
    today: datetime.date
    """When whatever was made after the theft can have been seen at the earliest."""

    @property
    def early(self) -> str:
        """A date that anybody can write on anything."""
        return f"{self.seen - datetime.timedelta(days=365)}T00:00:00Z"

    def read(self, name: str, claim: Document, commitment: Commitment, *, late: bool = False) -> Forgery:
        """The claim as an arbiter reads it, with a commitment seen in time, or only after the theft."""
        when = self.today if late else self.seen
        read = read_claim(claim, commitment, self.p, witnessed=when, published=self.published)
        return Forgery(name, 1, self.p, read.p, read.charge_bits, SIGNIFICANCE, read.reason)

    def attempt(self, name: str, act: Callable[[], Anchor | str]) -> Forgery:
        """Something that ends in an anchor, in words that say what is wrong, or in a refusal."""
        try:
            found = act()
        except PathmarkError as error:
            found = str(error)
        if isinstance(found, Anchor):
            return Forgery(name, 1, self.p, found.p(self.p), found.charge_bits, SIGNIFICANCE, found.reason)
        return Forgery.refused(name, self.p, found) if found else Forgery(name, 1, self.p, self.p, 0, SIGNIFICANCE, "")


def forge_papers(court: Court) -> list[Forgery]:
    """Every kind, each under its name."""
    return [*_replayed(court), *_altered(court), *_many_under_one_root(court), *_dates(court), *_registries(court)]


def _replayed(court: Court) -> list[Forgery]:
    """The owner's revealed claim in a thief's hands, and a thief's own key with an earlier date written on it."""
    owner, thief, early = court.owner, court.thief, court.early
    claim, own = reveal_watermark(owner, 0, bare=True), reveal_watermark(thief, 0, bare=True)
    made = commit_key(thief, created=early)
    copied = replace(made, root=commit_key(owner).root).signed_by(thief)
    named = commit_key(owner, created=early).signed_by(thief)
    return [
        court.read("the owner's claim with the thief's commitment", claim, made),
        court.read("the owner's claim, its root signed by the thief", claim, copied),
        court.read("the owner's claim, its root and name signed by the thief", claim, named),
        court.read("the thief's key, dated back", own, made, late=True),
        court.attempt("the same, shown to nobody", lambda: judge_anchor(thief, made, court.published)),
    ]


def _altered(court: Court) -> list[Forgery]:
    """A forger who did commit in time, and would now rather have committed to something else."""
    key = court.thief.attach(ATTACHED, b"as committed")
    commitment, claim = commit_key(key), reveal_watermark(key, 0)
    place = {opening["leaf"]["leaf"]: i for i, opening in enumerate(claim["openings"])}
    mark, number, attached = (place[name] for name in ("watermark/0", "id/0", f"attachment/{ATTACHED}"))
    foreign = reveal_watermark(court.owner, 0, bare=True)["openings"][mark]
    other_id = str((key.watermarks[0].id + 1) % key.watermarks[0].capacity)
    changes: dict[str, Callable[[Document], Any]] = {
        "an expert taken out of the committed pool": lambda c: _content(c, mark)["layers"][0]["pool"].pop(),
        "another id than the committed one": lambda c: _content(c, number).update(id=other_id),
        "another key's watermark in the place of the committed one": lambda c: c["openings"].__setitem__(mark, foreign),
        "the attachments left out": lambda c: c["openings"].pop(attached),
        "the attachments exchanged": lambda c: c["attached"].update({ATTACHED: "YWZ0ZXJ3YXJkcw=="}),
        "a leaf opened twice": lambda c: c["openings"].append(c["openings"][mark]),
    }
    found = []
    for name, change in changes.items():
        altered = copy.deepcopy(claim)
        change(altered)
        found.append(court.read(name, altered, commitment))
    later = reveal_watermark(key.attach(ATTACHED, b"made for this suspect"), 0)
    return [*found, court.read("profiles attached after the date", later, commitment)]


def _many_under_one_root(court: Court) -> list[Forgery]:
    """Several keys to choose from after the suspect was seen."""
    thief = court.thief
    grown = leaves(thief, thief.revision, LATEST)
    other = leaves(court.owner, court.owner.revision, LATEST)[1]
    twice = [*grown[:-1], {**other, "leaf": "watermark/0"}]
    more = [*grown[:-1], {**other, "leaf": "watermark/1"}]
    old = replace(commit_key(thief), version=1, root=root(thief, thief.revision, 1)).signed_by(thief)
    return [
        court.read("two keys under one root, the second opened", *_tree(thief, twice, "watermark/0", opened=-1)),
        court.read("more watermarks than the root counts", *_tree(thief, more, "watermark/1", opened=-1)),
        court.read("a root of the old format, which may hold any number", reveal_watermark(thief, 0, version=1), old),
    ]


def _dates(court: Court) -> list[Forgery]:
    """Dates that nobody vouched for."""
    made = commit_key(court.thief)
    stamped = replace(made, timestamps=(b"\x30\x03\x02\x01\x00",))
    tomorrow = court.today + datetime.timedelta(days=365)
    earlier = {**made.document(), "created": court.early}
    return [
        court.attempt(
            "a timestamp written by hand", lambda: judge_anchor(court.thief, stamped, court.published, [_authority()])
        ),
        court.attempt("a day of publication that is yet to come", lambda: judge_anchor(court.thief, made, tomorrow)),
        court.attempt("an earlier date put into a signed commitment", lambda: str(parse_commitment(earlier) and "")),
    ]


def _registries(court: Court) -> list[Forgery]:
    """Somebody else's name on the copy that was found."""
    rows = {
        "a licensee's name exchanged in the registry": "UPDATE issued SET licensee = 'Gamma' WHERE ordinal = 1",
        "a licensee's id exchanged in the registry": "UPDATE issued SET id = id + 1 WHERE ordinal = 1",
        "a licensee taken out of the registry": "DELETE FROM issued WHERE ordinal = 1",
    }
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, change) in enumerate(rows.items()):
            book = Registry(Path(folder) / f"{number}.db")
            for licensee in ("Alpha", "Beta"):
                book.issue(court.owner, licensee)
            signed = Receipt(*book.row("Alpha")).countersigned_by(Ed25519PrivateKey.generate()).document()
            with sqlite3.connect(book.path) as db:
                db.execute(change)
            found.append(court.attempt(name, partial("; ".join, book.problems())))
    moved = {**signed, "row": {**signed["row"], "licensee": "Beta"}}
    forged = {**signed, "licensee_key": court.owner.public_key.hex()}
    return [
        *found,
        court.attempt("a receipt with another licensee's name", lambda: str(parse_receipt(moved) and "")),
        court.attempt("a receipt that the licensee did not sign", lambda: str(parse_receipt(forged) and "")),
    ]


def _authority() -> x509.Certificate:
    """An authority that the reader trusts."""
    key, name = Ed25519PrivateKey.generate(), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Authority")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now)
    return made.sign(key, None)


def _content(claim: Document, place: int) -> Any:
    return claim["openings"][place]["leaf"]["content"]


def _tree(key: OwnerKey, grown: list[Document], name: str, *, opened: int) -> tuple[Document, Commitment]:
    """A forger's own tree, signed; and the claim that opens the leaf at one place under this name."""
    hashes = [leaf_hash(leaf) for leaf in grown]
    places = (0, opened % len(grown), 2)
    claim = {
        **reveal_watermark(key, 0, bare=True),
        "watermark": int(name.rpartition("/")[2]),
        "root": merkle_root(hashes).hex(),
        "openings": [{"leaf": grown[i], "proof": merkle_proof(hashes, i)} for i in places],
    }
    return claim, replace(commit_key(key), root=merkle_root(hashes)).signed_by(key)
