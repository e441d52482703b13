"""A private SQLite file: one format, mode 0600, one immediate transaction at a time, on disk before it returns."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pathmark.errors import KeyFileError
from pathmark.keys.safefile import require_private

_BUSY_SECONDS = 60.0


@dataclass(frozen=True)
class DatabaseFormat:
    """What a file has to be, in SQLite's own header and in words."""

    name: str
    """For errors: `registry`, `ledger`."""
    application_id: int
    version: int
    schema: str
    """Statements that make the tables, separated by semicolons."""
    made_by: str
    """Who makes the file, for the error about a missing one."""
    readable: tuple[int, ...] = ()
    """Earlier versions that the room that owns the format reads, and brings up to date when it writes."""


def create_private(path: Path) -> None:
    """An empty private file if there is none, so that SQLite never makes one with other permissions."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


@contextlib.contextmanager
def transaction(path: Path, form: DatabaseFormat, *, write: bool) -> Iterator[sqlite3.Connection]:
    """One transaction on a file of this format; a write is synced before the block is left."""
    try:
        if write:
            create_private(path)
        require_private(path)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            # A rollback journal, not WAL: at rest the database is one file that can be copied.
            db.execute("PRAGMA synchronous = FULL")
            _begin(db, write)
            try:
                _require_format(db, path, form, write)
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")
    except FileNotFoundError:
        reason = "its folder does not exist" if write else f"it does not exist; {form.made_by} makes it"
        raise KeyFileError(f"cannot open {path}: {reason}") from None
    except OSError as error:
        raise KeyFileError(f"cannot open {path}: {error.strerror}") from None
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the second where sqlite's own words hold damaged text
        raise KeyFileError(f"{path} cannot be used as a {form.name}: {error}") from None


def _begin(db: sqlite3.Connection, write: bool) -> None:
    """Take the lock. SQLite's own waiting sleeps up to 100 ms at a time, far longer than one entry takes."""
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


def _require_format(db: sqlite3.Connection, path: Path, form: DatabaseFormat, write: bool) -> None:
    found = int(db.execute("PRAGMA application_id").fetchone()[0])
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    empty = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if empty and found == 0:
        if not write:
            raise KeyFileError(f"{path} is empty; {form.made_by} fills it")
        for statement in form.schema.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {form.application_id}")
        db.execute(f"PRAGMA user_version = {form.version}")
    elif found != form.application_id:
        raise KeyFileError(f"{path} is a database of another program, not a {form.name}")
    elif version not in (form.version, *form.readable):
        raise KeyFileError(
            f"{path} has {form.name} format {version}, this program knows {form.version}; update pathmark"
        )
