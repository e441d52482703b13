"""The registry: distinct ids far apart, several processes at once, nothing lost in a crash."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from key_fixtures import make_key, plans

from pathmark.errors import CapacityError, KeyFileError
from pathmark.keys import OwnerKey, Registry, WatermarkRequest, save_key
from pathmark.keys.spread import guaranteed_distance, next_id, structured_length

WORKER = """
import sys
from pathmark.keys import Registry, load_key
key, registry, name, count = load_key(sys.argv[1]), Registry(sys.argv[2]), sys.argv[3], int(sys.argv[4])
for i in range(count):
    entry, new = registry.issue(key, f"{name}-{i}")
    print(entry.id, flush=True)
"""


def key_with(radix: int, layers: int, redundancy: int = 0) -> OwnerKey:
    chosen = plans(range(24 - layers, 24), experts=radix, width=1)
    return make_key(WatermarkRequest(plans=chosen, redundancy=redundancy), experts=radix)


def issue_all(key: OwnerKey, count: int) -> np.ndarray:
    mark = key.watermarks[0]
    rows = [mark.group_indices]
    for ordinal in range(1, count + 1):
        rows.append(mark.encode_id(next_id(mark, ordinal, np.array(rows))))
    return np.array(rows)


def smallest_distance(rows: np.ndarray) -> int:
    return min(int((a != b).sum()) for a, b in combinations(rows, 2))


@pytest.mark.parametrize(
    ("radix", "layers", "redundancy", "count", "expected"),
    [
        (30, 6, 0, 28, 6),  # 29 words with the owner's: all layers differ
        (30, 6, 0, 200, 5),
        (8, 4, 0, 48, 3),  # 7^2 words
        (8, 4, 0, 49, 2),
        (30, 6, 1, 28, 5),
        (30, 6, 2, 200, 5),
        (7, 5, 3, 48, 4),
    ],
)
def test_ids_are_as_far_apart_as_promised(radix: int, layers: int, redundancy: int, count: int, expected: int) -> None:
    key = key_with(radix, layers, redundancy)
    rows = issue_all(key, count)
    assert smallest_distance(rows) >= expected
    assert guaranteed_distance(key.watermarks[0].code, count) == expected
    if redundancy != 1:
        # Singleton: no set of that many words over the prime could be farther apart.
        p = key.watermarks[0].code.prime
        assert len(rows) > p ** (layers - (expected + 1) + 1) or expected == layers


def test_few_groups_use_the_best_of_many_draws() -> None:
    key = key_with(4, 8)
    assert structured_length(key.watermarks[0].code) is None
    assert guaranteed_distance(key.watermarks[0].code, 5) is None
    rows = issue_all(key, 20)
    # Twenty random words of eight digits would typically meet in five or six layers.
    assert smallest_distance(rows) >= 4


def test_until_the_last_id() -> None:
    for radix, layers, redundancy in ((3, 3, 0), (5, 2, 0), (6, 2, 0), (5, 3, 2), (3, 3, 1)):
        key = key_with(radix, layers, redundancy)
        capacity = key.watermarks[0].capacity
        rows = issue_all(key, capacity - 1)
        assert len({tuple(row) for row in rows}) == capacity
        with pytest.raises(CapacityError, match=r"all \d+ ids are issued"):
            next_id(key.watermarks[0], capacity, rows)


def test_issue_and_list(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "licensees.db")
    key = make_key()
    first, new = registry.issue(key, "  Alpha   Ltd ")
    again, still_new = registry.issue(key, "Alpha Ltd")
    assert new
    assert not still_new
    assert first == again
    second, _ = registry.issue(key, "Beta")
    assert [e.licensee for e in registry.entries()] == ["Alpha Ltd", "Beta"]
    assert second.distance == registry.distance() == 6
    assert first.id != second.id != key.watermarks[0].id
    assert key.with_id(second.id).watermarks[0].group_indices == second.group_indices
    assert registry.fingerprint() == key.fingerprint
    assert stat.S_IMODE(registry.path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["licensees.db"]
    raw = registry.path.read_bytes()
    assert key.watermarks[0].triggers[0].text.encode() not in raw
    assert key.secret.reveal() not in raw


def test_registry_belongs_to_one_key(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "r.db")
    key = make_key()
    registry.issue(key, "Alpha")
    with pytest.raises(KeyFileError, match="belongs to key"):
        registry.issue(make_key(secret=b"o" * 32), "Beta")
    with pytest.raises(KeyFileError, match="use the master key"):
        registry.issue(key.with_id(3), "Beta")
    with pytest.raises(KeyFileError, match="does not exist"):
        registry.issue(key, "Beta", watermark=1)
    with pytest.raises(KeyFileError, match="printable name"):
        registry.issue(key, " \n ")
    registry.check_key(key)
    with pytest.raises(KeyFileError, match="belongs to key"):
        registry.check_key(make_key(secret=b"o" * 32))
    assert len(registry.entries()) == 1


def test_foreign_damaged_missing_and_public_files(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="does not exist"):
        Registry(tmp_path / "none.db").entries()
    (tmp_path / "text.db").write_text("not a database, but long enough to look at" * 50)
    (tmp_path / "text.db").chmod(0o600)
    with pytest.raises(KeyFileError, match="cannot be used"):
        Registry(tmp_path / "text.db").issue(make_key(), "Alpha")
    db = sqlite3.connect(tmp_path / "other.db")
    db.execute("CREATE TABLE a (b)")
    db.commit()
    db.close()
    (tmp_path / "other.db").chmod(0o600)
    with pytest.raises(KeyFileError, match="another program"):
        Registry(tmp_path / "other.db").entries()
    registry = Registry(tmp_path / "r.db")
    registry.issue(make_key(), "Alpha")
    db = sqlite3.connect(tmp_path / "r.db")
    db.execute("PRAGMA user_version = 9")
    db.close()
    with pytest.raises(KeyFileError, match="update pathmark"):
        registry.entries()
    registry.path.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        registry.entries()


def test_two_thousand_ids_by_eight_processes_and_one_killed(tmp_path: Path) -> None:
    """Every id that a process has seen is in the file, once, whatever happens to another process."""
    key = make_key()
    save_key(key, tmp_path / "master.key", None, plain=True)
    registry = Registry(tmp_path / "r.db")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORKER, str(tmp_path / "master.key"), str(tmp_path / "r.db")]
    outputs = [(tmp_path / f"seen{i}").open("w+b") for i in range(9)]
    # The ninth is to be killed in the middle of its work; the other eight issue 250 each.
    workers = [
        subprocess.Popen([*command, f"w{i}", "250" if i < 8 else "100000"], stdout=outputs[i], env=environment)
        for i in range(9)
    ]
    deadline = time.monotonic() + 60
    while (tmp_path / "seen8").stat().st_size < 200 and time.monotonic() < deadline:
        time.sleep(0.02)
    workers[8].send_signal(signal.SIGKILL)
    assert [w.wait(timeout=120) for w in workers] == [0] * 8 + [-signal.SIGKILL]
    for output in outputs:
        output.close()
    seen = [line for i in range(9) for line in (tmp_path / f"seen{i}").read_text().split("\n")[:-1]]
    entries = registry.entries()
    issued = {str(e.id) for e in entries}
    assert len(issued) == len(entries) >= 2000
    assert len(seen) == len(set(seen))
    assert set(seen) <= issued
    assert len([e for e in entries if not e.licensee.startswith("w8-")]) == 2000
    # At most the one id that was committed but not yet reported when the process died is extra.
    assert len(issued) - len(seen) <= 1
    assert registry.distance() == 4 == guaranteed_distance(key.watermarks[0].code, len(entries))


V1 = """
CREATE TABLE binding (fingerprint TEXT NOT NULL, watermark INTEGER NOT NULL, radices TEXT NOT NULL,
                      redundancy INTEGER NOT NULL, own_id TEXT NOT NULL);
CREATE TABLE issued (ordinal INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, digits TEXT NOT NULL,
                     licensee TEXT NOT NULL UNIQUE, issued TEXT NOT NULL, distance INTEGER NOT NULL);
PRAGMA application_id = 0x50544D52;
PRAGMA user_version = 1;
"""


@pytest.fixture
def three_copies(tmp_path: Path) -> Registry:
    registry = Registry(tmp_path / "licensees.db")
    for name in ("Alpha", "Beta", "Gamma"):
        registry.issue(make_key(), name)
    assert registry.problems() == []
    return registry


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("UPDATE issued SET licensee = 'Delta' WHERE ordinal = 2", r"row 2 \(Delta\)"),
        ("UPDATE issued SET issued = '2001-01-01T00:00:00Z' WHERE ordinal = 1", r"row 1 \(Alpha\)"),
        ("UPDATE issued SET licensee = CASE ordinal WHEN 2 THEN 'Gamma ' ELSE 'Beta' END WHERE ordinal > 1", "row 2"),
        ("UPDATE issued SET id = (SELECT id + 1 FROM issued WHERE ordinal = 3) WHERE ordinal = 3", r"row 3 \(Gamma\)"),
        ("DELETE FROM issued WHERE ordinal = 2", "row 2 is missing"),
        ("UPDATE binding SET own_id = '5'", "row 1"),
        ("UPDATE binding SET public_key = hex(zeroblob(32))", "another key"),
    ],
)
def test_an_altered_row_is_noticed_and_named(three_copies: Registry, change: str, named: str) -> None:
    with sqlite3.connect(three_copies.path) as db:
        db.execute(change)
    (problem,) = three_copies.problems()
    assert re.search(named, problem), problem


def test_a_registry_of_version_1_is_read_and_signed_by_the_next_issue(three_copies: Registry, tmp_path: Path) -> None:
    old = Registry(tmp_path / "old.db")
    with sqlite3.connect(old.path) as db, sqlite3.connect(three_copies.path) as new:
        db.executescript(V1)
        db.execute("INSERT INTO binding VALUES (?, ?, ?, ?, ?)", new.execute("SELECT * FROM binding").fetchone()[:5])
        for row in new.execute("SELECT * FROM issued"):
            db.execute("INSERT INTO issued VALUES (?, ?, ?, ?, ?, ?)", row[:6])
    old.path.chmod(0o600)
    assert [entry.licensee for entry in old.entries()] == ["Alpha", "Beta", "Gamma"]
    assert "version 1" in old.problems()[0]
    old.check_key(make_key())
    assert old.issue(make_key(), "Delta")[0].ordinal == 4
    assert old.problems() == []
