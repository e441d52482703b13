"""Who got which id: one SQLite file per key, safe with several processes and with crashes.

Each issue is one immediate transaction, synced to disk before the id is handed out: an id that a caller has seen is
never lost and never given twice. The rows are a chain that the owner's key signs: each row's signature covers the one
before it, so an edited, swapped or missing row is noticed and named. That the last rows are missing, as in an old copy
of the file, only a newer copy shows. The file holds licensees' names and ids but nothing secret of the key; it is
private nevertheless (mode 0600).
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from pathmark.errors import KeyFileError
from pathmark.keys.canonical import Document, canonical
from pathmark.keys.database import DatabaseFormat, transaction
from pathmark.keys.key import OwnerKey, fingerprint, utc_now
from pathmark.keys.spread import Digits, distances, next_id
from pathmark.keys.watermark import Watermark

_FORMAT: Final = DatabaseFormat(
    name="registry",
    application_id=0x50544D52,
    version=2,
    schema="""
CREATE TABLE binding (fingerprint TEXT NOT NULL, watermark INTEGER NOT NULL, radices TEXT NOT NULL,
                      redundancy INTEGER NOT NULL, own_id TEXT NOT NULL, public_key TEXT NOT NULL DEFAULT '');
CREATE TABLE issued (ordinal INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, digits TEXT NOT NULL,
                     licensee TEXT NOT NULL UNIQUE, issued TEXT NOT NULL, distance INTEGER NOT NULL,
                     signature TEXT NOT NULL DEFAULT '');
""",
    made_by="`pathmark issue`",
    readable=(1,),
)
ROW_SIGNED: Final = b"pathmark registry 2\n"
"""What stands before a row where it is signed."""


@dataclass(frozen=True)
class Issued:
    """One licensee's id."""

    ordinal: int
    """1 for the first licensee."""
    id: int
    licensee: str
    issued: str
    """UTC, ISO 8601."""
    distance: int
    """Layers in which it differed from the nearest id issued before it, or from the owner's own."""
    group_indices: tuple[int, ...]
    signature: bytes = b""
    """Of the owner's key, over this row and the one before it; empty in files of version 1."""


class Registry:
    """The ids issued for one watermark of one key."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def issue(self, key: OwnerKey, licensee: str, *, watermark: int = 0) -> tuple[Issued, bool]:
        """Allot an id to a licensee, and whether it is new: asking twice gives the same id.

        The file is made on first use and belongs to that key and watermark from then on.
        """
        name = " ".join(licensee.split())
        if not name or len(name) > 500 or not name.isprintable():
            raise KeyFileError("a licensee needs a printable name of at most 500 characters")
        if not 0 <= watermark < len(key.watermarks):
            raise KeyFileError(f"watermark {watermark} does not exist; this key has {len(key.watermarks)}")
        mark = key.watermarks[watermark]
        with transaction(self.path, _FORMAT, write=True) as db:
            self._bind(db, key, mark)
            _bring_up_to_date(db, key)
            row = db.execute("SELECT * FROM issued WHERE licensee = ?", (name,)).fetchone()
            if row is not None:
                return _issued(row), False
            taken_NL = _taken(db, mark)
            ordinal = len(taken_NL)
            number = next_id(mark, ordinal, taken_NL)
            digits = mark.encode_id(number)
            gap = int(distances(digits, taken_NL).min())
            entry = Issued(ordinal, number, name, utc_now(), gap, digits)
            entry = _signed(entry, _end(db), key.signing_key)
            db.execute(
                "INSERT INTO issued VALUES (?, ?, ?, ?, ?, ?, ?)",
                (ordinal, str(number), _join(digits), name, entry.issued, gap, entry.signature.hex()),
            )
        return entry, True

    def problems(self) -> list[str]:
        """Rows that the owner's key did not write as they stand, in words; empty if the whole chain holds."""
        with transaction(self.path, _FORMAT, write=False) as db:
            if _version(db) < _FORMAT.version:
                return ["this registry is of version 1, whose rows nobody signed; the next `pathmark issue` signs them"]
            entries, link = _entries(db), _start(db)
            named, public = db.execute("SELECT fingerprint, public_key FROM binding").fetchone() or ("", "")
        try:
            signer = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        except ValueError:
            return ["the registry does not say which key signs its rows"]
        if fingerprint(bytes.fromhex(public)) != named:
            return ["the registry belongs to another key than the one that signs its rows"]
        for place, entry in enumerate(entries, start=1):
            if entry.ordinal != place:
                return [f"row {place} is missing"]
            try:
                signer.verify(entry.signature, ROW_SIGNED + canonical(_row(entry, link)))
            except InvalidSignature:
                return [f"row {place} ({entry.licensee}) is not what the owner's key signed"]
            link = entry.signature.hex()
        return []

    def row(self, licensee: str) -> tuple[bytes, Document, bytes]:
        """The owner's public key, a licensee's row as the owner signed it, and that signature: what a receipt shows."""
        with transaction(self.path, _FORMAT, write=False) as db:
            link, entries = _start(db), _entries(db)
            public = str((db.execute("SELECT public_key FROM binding").fetchone() or ("",))[0])
        for entry in entries:
            if entry.licensee == licensee:
                return bytes.fromhex(public), _row(entry, link), entry.signature
            link = entry.signature.hex()
        raise KeyFileError(f"{self.path} has no licensee {licensee!r}; `pathmark registry list` shows all")

    def entries(self) -> list[Issued]:
        """All issued ids in their order."""
        with transaction(self.path, _FORMAT, write=False) as db:
            return _entries(db)

    def distance(self) -> int | None:
        """Layers in which the two nearest of all ids differ, the owner's own included; None if empty."""
        with transaction(self.path, _FORMAT, write=False) as db:
            smallest = db.execute("SELECT min(distance) FROM issued").fetchone()[0]
            return None if smallest is None else int(smallest)

    def fingerprint(self) -> str:
        """The key that this registry belongs to."""
        with transaction(self.path, _FORMAT, write=False) as db:
            row = db.execute("SELECT fingerprint FROM binding").fetchone()
            return str(row[0]) if row else ""

    def check_key(self, key: OwnerKey, watermark: int = 0) -> None:
        """Raise KeyFileError if the registry belongs to another key or watermark."""
        with transaction(self.path, _FORMAT, write=False) as db:
            _require_same(db, self.path, key, key.watermarks[watermark])

    def check_whole(self, key: OwnerKey) -> None:
        """The same, and if it was altered: before anything rests on whom it names."""
        self.check_key(key)
        if problems := self.problems():
            raise KeyFileError(f"{self.path} names nobody: {problems[0]}")

    def _bind(self, db: sqlite3.Connection, key: OwnerKey, mark: Watermark) -> None:
        if _version(db) == 1:
            db.execute("ALTER TABLE binding ADD COLUMN public_key TEXT NOT NULL DEFAULT ''")
        if db.execute("SELECT count(*) FROM binding").fetchone()[0]:
            _require_same(db, self.path, key, mark)
        else:
            db.execute("INSERT INTO binding VALUES (?, ?, ?, ?, ?, ?)", (*_binding(key, mark), key.public_key.hex()))


def _binding(key: OwnerKey, mark: Watermark) -> tuple[str, int, str, int, str]:
    return (key.fingerprint, mark.index, _join(mark.code.radices), mark.redundancy, str(mark.id))


def _require_same(db: sqlite3.Connection, path: Path, key: OwnerKey, mark: Watermark) -> None:
    row = db.execute("SELECT * FROM binding").fetchone()
    if row is None or row[0] != key.fingerprint:
        raise KeyFileError(f"{path} belongs to key {row[0] if row else '(none)'}, not to {key.fingerprint}")
    if row[1] != mark.index:
        raise KeyFileError(f"{path} issues ids of watermark {row[1]}, not of {mark.index}; use one file for each")
    if tuple(row[:5]) != _binding(key, mark):
        raise KeyFileError(
            f"{path} was begun with the owner's id {row[4]}, this key carries {mark.id}; use the master key"
        )


def _taken(db: sqlite3.Connection, mark: Watermark) -> Digits:
    """Group indices of the owner's own id and of all issued ones."""
    rows = [row[0] for row in db.execute("SELECT digits FROM issued ORDER BY ordinal")]
    flat = np.array(",".join([_join(mark.group_indices), *rows]).split(","), dtype=np.int64)
    return flat.reshape(len(rows) + 1, len(mark.group_indices))


def _issued(row: tuple[Any, ...]) -> Issued:
    ordinal, number, digits, licensee, issued, distance, *signature = row
    try:
        indices = tuple(int(d) for d in digits.split(","))
        found = Issued(
            int(ordinal), int(number), licensee, issued, int(distance), indices, bytes.fromhex("".join(signature))
        )
    except (AttributeError, TypeError, ValueError):
        found = None
    if found is None or not isinstance(licensee, str) or not isinstance(issued, str):
        raise KeyFileError("a row of the registry is damaged; restore the file from a backup")
    return found


def _entries(db: sqlite3.Connection) -> list[Issued]:
    return [_issued(row) for row in db.execute("SELECT * FROM issued ORDER BY ordinal")]


def _start(db: sqlite3.Connection) -> str:
    """What the signature of the first row covers of what stands before it."""
    binding = db.execute("SELECT fingerprint, watermark, radices, redundancy, own_id FROM binding").fetchone()
    return sha256(canonical({"binding": list(binding or ())})).hexdigest()


def _end(db: sqlite3.Connection) -> str:
    """What the signature of the next row covers of what stands before it: the last row's signature."""
    last = db.execute("SELECT signature FROM issued ORDER BY ordinal DESC LIMIT 1").fetchone()
    return _start(db) if last is None else str(last[0])


def _row(entry: Issued, link: str) -> Document:
    """What is signed of a row."""
    return {
        "before": link,
        "ordinal": entry.ordinal,
        "id": str(entry.id),
        "digits": list(entry.group_indices),
        "licensee": entry.licensee,
        "issued": entry.issued,
        "distance": entry.distance,
    }


def _signed(entry: Issued, link: str, key: Ed25519PrivateKey) -> Issued:
    return replace(entry, signature=key.sign(ROW_SIGNED + canonical(_row(entry, link))))


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _bring_up_to_date(db: sqlite3.Connection, key: OwnerKey) -> None:
    """Sign the rows of a registry of version 1, once, with the key that it belongs to."""
    if _version(db) == _FORMAT.version:
        return
    db.execute("ALTER TABLE issued ADD COLUMN signature TEXT NOT NULL DEFAULT ''")
    link = _start(db)
    for entry in _entries(db):
        link = _signed(entry, link, key.signing_key).signature.hex()
        db.execute("UPDATE issued SET signature = ? WHERE ordinal = ?", (link, entry.ordinal))
    db.execute("UPDATE binding SET public_key = ?", (key.public_key.hex(),))
    db.execute(f"PRAGMA user_version = {_FORMAT.version}")


def _join(digits: tuple[int, ...]) -> str:
    return ",".join(map(str, digits))
