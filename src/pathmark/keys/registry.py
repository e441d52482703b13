"""Who got which id: one SQLite file per key, safe with several processes and with crashes.

Each issue is one immediate transaction, synced to disk before the id is handed out: an id that a
caller has seen is never lost and never given twice. The file holds licensees' names and ids but
nothing secret of the key; it is private nevertheless (mode 0600).
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pathmark.errors import KeyFileError
from pathmark.keys.key import OwnerKey, utc_now
from pathmark.keys.safefile import require_private
from pathmark.keys.spread import Digits, distances, next_id
from pathmark.keys.watermark import Watermark

_APPLICATION_ID = 0x50544D52
_VERSION = 1
_BUSY_SECONDS = 60.0
_SCHEMA = """
CREATE TABLE binding (fingerprint TEXT NOT NULL, watermark INTEGER NOT NULL, radices TEXT NOT NULL,
                      redundancy INTEGER NOT NULL, own_id TEXT NOT NULL);
CREATE TABLE issued (ordinal INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, digits TEXT NOT NULL,
                     licensee TEXT NOT NULL UNIQUE, issued TEXT NOT NULL, distance INTEGER NOT NULL);
"""


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
        self._create()
        with self._transaction(write=True) as db:
            self._bind(db, key, mark)
            row = db.execute("SELECT * FROM issued WHERE licensee = ?", (name,)).fetchone()
            if row is not None:
                return _issued(row), False
            taken_NL = _taken(db, mark)
            ordinal = len(taken_NL)
            number = next_id(mark, ordinal, taken_NL)
            digits = mark.encode_id(number)
            gap = int(distances(digits, taken_NL).min())
            entry = Issued(ordinal, number, name, utc_now(), gap, digits)
            db.execute(
                "INSERT INTO issued VALUES (?, ?, ?, ?, ?, ?)",
                (ordinal, str(number), _join(digits), name, entry.issued, gap),
            )
        return entry, True

    def entries(self) -> list[Issued]:
        """All issued ids in their order."""
        with self._transaction(write=False) as db:
            return [_issued(row) for row in db.execute("SELECT * FROM issued ORDER BY ordinal")]

    def distance(self) -> int | None:
        """Layers in which the two nearest of all ids differ, the owner's own included; None if empty."""
        with self._transaction(write=False) as db:
            smallest = db.execute("SELECT min(distance) FROM issued").fetchone()[0]
            return None if smallest is None else int(smallest)

    def fingerprint(self) -> str:
        """The key that this registry belongs to."""
        with self._transaction(write=False) as db:
            row = db.execute("SELECT fingerprint FROM binding").fetchone()
            return str(row[0]) if row else ""

    def check_key(self, key: OwnerKey, watermark: int = 0) -> None:
        """Raise KeyFileError if the registry belongs to another key or watermark."""
        with self._transaction(write=False) as db:
            _require_same(db, self.path, key, key.watermarks[watermark])

    def _create(self) -> None:
        """An empty private file, so that SQLite never makes one with other permissions."""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))

    @contextlib.contextmanager
    def _transaction(self, *, write: bool) -> Iterator[sqlite3.Connection]:
        try:
            require_private(self.path)
            db = sqlite3.connect(self.path, isolation_level=None)
            with contextlib.closing(db):
                # A rollback journal, not WAL: at rest the registry is one file that can be copied.
                db.execute("PRAGMA synchronous = FULL")
                _begin(db, write)
                try:
                    _require_registry(db, self.path, write)
                    yield db
                except BaseException:
                    db.execute("ROLLBACK")
                    raise
                db.execute("COMMIT")
        except FileNotFoundError:
            raise KeyFileError(f"{self.path} does not exist; `pathmark issue` makes it") from None
        except OSError as error:
            raise KeyFileError(f"cannot open {self.path}: {error.strerror}") from None
        except sqlite3.Error as error:
            raise KeyFileError(f"{self.path} cannot be used as a registry: {error}") from None

    def _bind(self, db: sqlite3.Connection, key: OwnerKey, mark: Watermark) -> None:
        if db.execute("SELECT count(*) FROM binding").fetchone()[0]:
            _require_same(db, self.path, key, mark)
        else:
            db.execute("INSERT INTO binding VALUES (?, ?, ?, ?, ?)", _binding(key, mark))


def _begin(db: sqlite3.Connection, write: bool) -> None:
    """Take the lock. SQLite's own waiting sleeps up to 100 ms at a time, far longer than one issue takes."""
    deadline = time.monotonic() + _BUSY_SECONDS
    db.execute("PRAGMA busy_timeout = 0")
    while True:
        try:
            db.execute("BEGIN IMMEDIATE" if write else "BEGIN")
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0.001, 0.008))
    db.execute(f"PRAGMA busy_timeout = {int(_BUSY_SECONDS * 1000)}")


def _binding(key: OwnerKey, mark: Watermark) -> tuple[str, int, str, int, str]:
    return (key.fingerprint, mark.index, _join(mark.code.radices), mark.redundancy, str(mark.id))


def _require_same(db: sqlite3.Connection, path: Path, key: OwnerKey, mark: Watermark) -> None:
    row = db.execute("SELECT * FROM binding").fetchone()
    if row is None or row[0] != key.fingerprint:
        raise KeyFileError(f"{path} belongs to key {row[0] if row else '(none)'}, not to {key.fingerprint}")
    if row[1] != mark.index:
        raise KeyFileError(f"{path} issues ids of watermark {row[1]}, not of {mark.index}; use one file for each")
    if tuple(row) != _binding(key, mark):
        raise KeyFileError(
            f"{path} was begun with the owner's id {row[4]}, this key carries {mark.id}; use the master key"
        )


def _require_registry(db: sqlite3.Connection, path: Path, write: bool) -> None:
    found = int(db.execute("PRAGMA application_id").fetchone()[0])
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    empty = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if empty and found == 0:
        if not write:
            raise KeyFileError(f"{path} is empty; `pathmark issue` fills it")
        for statement in _SCHEMA.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {_VERSION}")
    elif found != _APPLICATION_ID:
        raise KeyFileError(f"{path} is a database of another program, not a registry")
    elif version != _VERSION:
        raise KeyFileError(f"{path} has registry format {version}, this program knows {_VERSION}; update pathmark")


def _taken(db: sqlite3.Connection, mark: Watermark) -> Digits:
    """Group indices of the owner's own id and of all issued ones."""
    rows = [row[0] for row in db.execute("SELECT digits FROM issued ORDER BY ordinal")]
    flat = np.array(",".join([_join(mark.group_indices), *rows]).split(","), dtype=np.int64)
    return flat.reshape(len(rows) + 1, len(mark.group_indices))


def _issued(row: tuple[int, str, str, str, str, int]) -> Issued:
    ordinal, number, digits, licensee, issued, distance = row
    return Issued(ordinal, int(number), licensee, issued, distance, tuple(int(d) for d in digits.split(",")))


def _join(digits: tuple[int, ...]) -> str:
    return ",".join(map(str, digits))
