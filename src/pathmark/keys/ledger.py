"""Which trigger was shown to whom: a live trial discloses a trigger, and a disclosed one can be blocked.

One SQLite file beside the key, mode 0600, safe with several processes. It holds the numbers of triggers,
never their texts. A trigger is entered before it is sent: after a crash it may count as used without
having been seen, never the other way round.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from pathmark.errors import CapacityError, KeyFileError
from pathmark.keys.database import DatabaseFormat, transaction
from pathmark.keys.key import OwnerKey, utc_now
from pathmark.keys.phrase import Trigger

_FORMAT: Final = DatabaseFormat(
    name="ledger",
    application_id=0x50544D4C,
    version=1,
    schema="""
CREATE TABLE binding (fingerprint TEXT NOT NULL);
CREATE TABLE used (watermark INTEGER NOT NULL, number INTEGER NOT NULL, host TEXT NOT NULL, model TEXT NOT NULL,
                   first TEXT NOT NULL, last TEXT NOT NULL, times INTEGER NOT NULL,
                   PRIMARY KEY (watermark, number, host, model));
""",
    made_by="the first live verification",
)


class TriggerRef(NamedTuple):
    """A trigger by its place in the key; says nothing about its text."""

    watermark: int
    number: int

    def of(self, key: OwnerKey) -> Trigger:
        """The trigger itself."""
        if not 0 <= self.watermark < len(key.watermarks):
            raise CapacityError(f"watermark {self.watermark} does not exist; this key has {len(key.watermarks)}")
        triggers = key.watermarks[self.watermark].triggers
        if not 0 <= self.number < len(triggers):
            raise CapacityError(
                f"watermark {self.watermark} has no trigger {self.number}; it has {len(triggers)}, counted from 0"
            )
        return triggers[self.number]

    def __str__(self) -> str:
        return f"{self.watermark}.{self.number}"


def trigger_refs(key: OwnerKey) -> list[TriggerRef]:
    """All triggers of a key: the first of every watermark, then the second ones, and so on."""
    refs = [TriggerRef(w.index, number) for w in key.watermarks for number in range(len(w.triggers))]
    return sorted(refs, key=lambda ref: (ref.number, ref.watermark))


@dataclass(frozen=True)
class Use:
    """One trigger against one model behind one host."""

    trigger: TriggerRef
    host: str
    model: str
    first: str
    """UTC, ISO 8601."""
    last: str
    times: int
    """Requests sent; 0 for a trigger that was set aside for a run that sent nothing."""


@dataclass(frozen=True)
class Taken:
    """Triggers chosen for a run."""

    triggers: tuple[TriggerRef, ...]
    left: int
    """Triggers of the key that nobody has seen yet, these not counted."""
    reused: int
    """How many of the chosen ones somebody may have seen before."""

    def warnings(self) -> list[str]:
        """What the owner should read before the next run; empty while enough is left."""
        said = []
        if self.reused:
            said.append(
                f"{self.reused} of {len(self.triggers)} triggers were used before: an operator may know and block "
                "them, and no mark in the reply would then mean nothing"
            )
        if not self.left:
            said.append("no unused trigger is left in this key; keygen --triggers makes keys with more")
        return said


class Ledger:
    """The triggers of one key that were sent to somebody."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @classmethod
    def beside(cls, key_file: Path | str) -> Ledger:
        """The ledger of a key file: the same name with `.ledger` behind it."""
        path = Path(key_file)
        return cls(path.with_name(path.name + ".ledger"))

    def take(self, key: OwnerKey, count: int, *, host: str, model: str) -> Taken:
        """Choose triggers for a run against a model and enter them, in one step.

        Unused ones first, so that two runs at once take different ones; then those used least, oldest first.
        """
        if count < 1:
            raise CapacityError(f"at least one trigger is needed, got {count}")
        refs = trigger_refs(key)
        with transaction(self.path, _FORMAT, write=True) as db:
            _bind(db, self.path, key)
            seen: dict[TriggerRef, tuple[int, str]] = {}
            for use in _uses(db):
                times, last = seen.get(use.trigger, (0, ""))
                seen[use.trigger] = (times + use.times, max(last, use.last))
            unused = [ref for ref in refs if ref not in seen]
            worn = sorted((ref for ref in refs if ref in seen), key=lambda ref: seen[ref])
            chosen = (unused + worn)[:count]
            for ref in chosen:
                _enter(db, ref, host, model, 0)
        fresh = min(count, len(unused))
        return Taken(tuple(chosen), len(unused) - fresh, len(chosen) - fresh)

    def record(self, key: OwnerKey, trigger: TriggerRef, *, host: str, model: str, times: int = 1) -> None:
        """Enter requests that are about to be sent."""
        trigger.of(key)
        with transaction(self.path, _FORMAT, write=True) as db:
            _bind(db, self.path, key)
            _enter(db, trigger, host, model, times)

    def uses(self) -> list[Use]:
        """Everything entered, by time of first use."""
        if not self.path.exists():
            return []
        with transaction(self.path, _FORMAT, write=False) as db:
            return _uses(db)

    def unused_triggers(self, key: OwnerKey) -> list[TriggerRef]:
        """Triggers of the key that were never sent to anybody."""
        if not self.path.exists():
            return trigger_refs(key)
        with transaction(self.path, _FORMAT, write=False) as db:
            _require_same(db, self.path, key)
            seen = {use.trigger for use in _uses(db)}
        return [ref for ref in trigger_refs(key) if ref not in seen]


def _uses(db: sqlite3.Connection) -> list[Use]:
    rows = db.execute(
        "SELECT watermark, number, host, model, first, last, times FROM used ORDER BY first, watermark, number"
    )
    return [Use(TriggerRef(w, n), host, model, first, last, times) for w, n, host, model, first, last, times in rows]


def _enter(db: sqlite3.Connection, trigger: TriggerRef, host: str, model: str, times: int) -> None:
    now = utc_now()
    db.execute(
        "INSERT INTO used VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (watermark, number, host, model) "
        "DO UPDATE SET last = excluded.last, times = times + excluded.times",
        (*trigger, host, model, now, now, times),
    )


def _bind(db: sqlite3.Connection, path: Path, key: OwnerKey) -> None:
    if db.execute("SELECT count(*) FROM binding").fetchone()[0]:
        _require_same(db, path, key)
    else:
        db.execute("INSERT INTO binding VALUES (?)", (key.fingerprint,))


def _require_same(db: sqlite3.Connection, path: Path, key: OwnerKey) -> None:
    row = db.execute("SELECT fingerprint FROM binding").fetchone()
    if row is None or row[0] != key.fingerprint:
        raise KeyFileError(f"{path} belongs to key {row[0] if row else '(none)'}, not to {key.fingerprint}")
