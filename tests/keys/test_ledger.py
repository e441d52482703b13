"""The ledger: every disclosed trigger is in it, unused ones come first, several processes at once."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from key_fixtures import PASSPHRASE, golden_key, make_key, plans, secret_forms

from pathmark.errors import CapacityError, KeyFileError
from pathmark.keys import Ledger, TriggerRef, WatermarkRequest, save_key, trigger_refs

WORKER = """
import sys
from pathmark.keys import Ledger, load_key
key, ledger = load_key(sys.argv[1], lambda: sys.argv[4]), Ledger(sys.argv[2])
for _ in range(int(sys.argv[3])):
    [ref] = ledger.take(key, 1, host="there", model="m").triggers
    print(ref.number, flush=True)
"""
THERE = {"host": "api.example:443", "model": "suspect"}


def key_with(triggers: int):
    return make_key(WatermarkRequest(plans=plans(range(18, 24)), triggers=triggers, trigger_tokens=4))


def test_unused_triggers_come_first_and_are_then_used(tmp_path: Path) -> None:
    key, ledger = key_with(5), Ledger(tmp_path / "owner.key.ledger")
    assert ledger.uses() == []
    assert ledger.unused_triggers(key) == trigger_refs(key) == [TriggerRef(0, n) for n in range(5)]
    first = ledger.take(key, 2, **THERE)
    assert first.triggers == (TriggerRef(0, 0), TriggerRef(0, 1))
    assert (first.left, first.reused, first.warnings()) == (3, 0, [])
    second = ledger.take(key, 2, host="other", model="m")
    assert second.triggers == (TriggerRef(0, 2), TriggerRef(0, 3))
    third = ledger.take(key, 2, host="other", model="m")
    assert third.triggers[0] == TriggerRef(0, 4)
    assert (third.left, third.reused) == (0, 1)
    assert "1 of 2 triggers were used before" in third.warnings()[0]
    assert "no unused trigger is left" in third.warnings()[1]
    assert ledger.unused_triggers(key) == []


def test_worn_triggers_come_back_least_used_first(tmp_path: Path) -> None:
    key, ledger = key_with(3), Ledger(tmp_path / "l")
    for number, times in ((0, 9), (1, 2), (2, 5)):
        ledger.record(key, TriggerRef(0, number), **THERE, times=times)
    assert [ref.number for ref in ledger.take(key, 3, **THERE).triggers] == [1, 2, 0]


def test_uses_are_counted_per_model_and_host(tmp_path: Path) -> None:
    key, ledger = key_with(2), Ledger(tmp_path / "l")
    for host, model, times in (("a", "m", 1), ("a", "m", 2), ("a", "n", 4), ("b", "m", 8)):
        ledger.record(key, TriggerRef(0, 1), host=host, model=model, times=times)
    assert {(u.host, u.model): u.times for u in ledger.uses()} == {("a", "m"): 3, ("a", "n"): 4, ("b", "m"): 8}
    assert all(u.trigger == TriggerRef(0, 1) and u.first <= u.last for u in ledger.uses())
    assert ledger.unused_triggers(key) == [TriggerRef(0, 0)]


def test_all_watermarks_have_their_turn() -> None:
    assert trigger_refs(golden_key()) == [TriggerRef(0, 0), TriggerRef(1, 0), TriggerRef(1, 1)]
    with pytest.raises(CapacityError, match="has no trigger 7"):
        TriggerRef(0, 7).of(golden_key())
    with pytest.raises(CapacityError, match="watermark 9 does not exist"):
        TriggerRef(9, 0).of(golden_key())


def test_the_file_is_private_and_holds_no_secret(tmp_path: Path) -> None:
    key, ledger = golden_key(), Ledger.beside(tmp_path / "owner.key")
    ledger.take(key, 3, **THERE)
    assert [p.name for p in tmp_path.iterdir()] == ["owner.key.ledger"]
    assert stat.S_IMODE(ledger.path.stat().st_mode) == 0o600
    content = ledger.path.read_bytes()
    assert b"api.example" in content
    assert not [form for form in secret_forms(key) if form in content]
    ledger.path.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        ledger.uses()


def test_a_ledger_belongs_to_one_key(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    ledger.take(key_with(2), 1, **THERE)
    stranger = make_key(secret=bytes(32))
    for action in (lambda: ledger.take(stranger, 1, **THERE), lambda: ledger.unused_triggers(stranger)):
        with pytest.raises(KeyFileError, match="belongs to key"):
            action()


def test_other_files_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a database, not a database, not a database")
    text.chmod(0o600)
    foreign = tmp_path / "foreign"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE t (x)")
    foreign.chmod(0o600)
    future = tmp_path / "future"
    Ledger(future).take(key_with(2), 1, **THERE)
    with sqlite3.connect(future) as db:
        db.execute("PRAGMA user_version = 2")
    for path, reason in ((text, "cannot be used"), (foreign, "another program"), (future, "update pathmark")):
        with pytest.raises(KeyFileError, match=reason):
            Ledger(path).uses()
    with pytest.raises(KeyFileError, match="cannot open"):
        Ledger(tmp_path / "no" / "folder").take(key_with(2), 1, **THERE)
    with pytest.raises(CapacityError, match="at least one trigger"):
        Ledger(future).take(key_with(2), 0, **THERE)


def test_processes_at_once_take_different_triggers(tmp_path: Path) -> None:
    key = key_with(12)
    save_key(key, tmp_path / "owner.key", PASSPHRASE)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, tmp_path / "owner.key", tmp_path / "l", "4", PASSPHRASE],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    taken = [int(line) for worker in workers for line in worker.communicate()[0].split()]
    assert sorted(taken) == list(range(12))


def test_threads_lose_no_count(tmp_path: Path) -> None:
    key, ledger = key_with(2), Ledger(tmp_path / "l")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: ledger.record(key, TriggerRef(0, 0), **THERE), range(40)))
    assert [u.times for u in ledger.uses()] == [40]
