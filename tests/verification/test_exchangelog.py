"""Runs that are interrupted and go on; what the ledger and the log keep."""

from __future__ import annotations

import json
import stat

import fake_api as fake
import pytest
from blackbox_helpers import TRIALS, ask, client, codec, owner
from embed_helpers import key_for
from verify_helpers import Told

from pathmark.errors import VerificationError
from pathmark.keys import Ledger
from pathmark.verification import Anchor
from pathmark.verification.blackbox.replies import Failure, Reply
from pathmark.verification.blackbox.trials import plan_queries


class InterruptedRunError(Exception):
    pass


class Faulty:
    """A backend that is interrupted after some answers."""

    discloses, host, model = True, "there", "suspect"

    def __init__(self, key, after):
        self.key, self.after, self.asked = key, after, []

    def prepare(self):
        return "chat"

    def ask(self, queries, max_tokens, *, sending, answered):
        for query in queries:
            if len(self.asked) == self.after:
                raise InterruptedRunError
            sending(query)
            self.asked.append(query.number)
            text = fake.mark_of(self.key, query.prompt) or f"plain {query.number} words for this and no other one"
            answered(query, Failure("busy") if query.number == 1 else Reply(text, "stop"))


@pytest.mark.parametrize("redact", [False, True])
def test_an_interrupted_run_goes_on_without_repeating(tmp_path, redact):
    key, log = owner(), tmp_path / "run.jsonl"
    options = {"log": log, "redact": redact, "ledger": Ledger(tmp_path / "l")}
    first = Faulty(key, 7)
    with pytest.raises(InterruptedRunError):
        ask(first, key, **options)
    with log.open("ab") as file:  # a crash in the middle of a line
        file.write(b'{"at": "2026-01-01T00:00:00Z", "numb')
    second = Faulty(key, 1000)
    seen = ask(second, key, **options)
    assert seen.marked
    assert set(first.asked) & set(second.asked) == {1}  # what failed is asked again
    assert seen.failures == 1
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    text = log.read_text()
    hidden = [t.text for t in key.watermarks[0].triggers] + fake.every_mark(key)
    assert any(json.dumps(h)[1:-1] in text for h in hidden) != redact
    assert [json.loads(line).get("number") for line in text.splitlines()[1:]] == first.asked + second.asked
    third = Faulty(key, 1000)
    again = ask(third, key, **options)
    assert third.asked == [1]
    assert (again.match_rate, again.triggers) == (seen.match_rate, seen.triggers)
    plan = plan_queries(key, seen.triggers, codec(), trials=TRIALS, seed=0, endpoint="chat")
    sent = [n for n in first.asked + second.asked + third.asked if plan[n].kind == "trigger"]
    assert sum(u.times for u in Ledger(tmp_path / "l").uses()) == len(sent) >= TRIALS


def test_a_complete_log_is_judged_without_asking_anybody(tmp_path):
    with fake.FakeApi(fake.marked(owner())) as api:
        gone = client(api)
        first = ask(client(api), owner(), log=tmp_path / "log", anchor=Anchor(True, "dated", 80))
    again = ask(gone, owner(), log=tmp_path / "log", anchor=Anchor(True, "dated", 80))
    assert (again.p, again.match_rate) == (first.p, first.match_rate)
    assert first.p_third_party == first.p
    assert again.p_third_party.value == 1  # whoever brings a log could have written it
    assert "taken from a log" in again.words()


def test_a_log_of_another_run_or_a_damaged_one_is_refused(tmp_path):
    key, log = owner(), tmp_path / "run.jsonl"
    ask(Faulty(key, 1000), key, log=log)
    with pytest.raises(VerificationError, match="trials was 12, is 13"):
        ask(Faulty(key, 1000), key, trials=TRIALS + 1, log=log)
    other = key_for("bundled:tiny", triggers=5, seed=1)
    with pytest.raises(VerificationError, match="belongs to key"):
        ask(Faulty(other, 1000), other, log=log)
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0] + b"{}\n" + lines[1])
    with pytest.raises(VerificationError, match="damaged in line 2"):
        ask(Faulty(key, 1000), key, log=log)


def test_the_ledger_gives_fresh_triggers_and_warns(tmp_path):
    key, ledger = owner(), Ledger(tmp_path / "owner.key.ledger")
    used = []
    for _ in range(3):
        seen = ask(Faulty(key, 1000), key, ledger=ledger)
        used.append(seen.triggers)
    assert [len(u) for u in used] == [3, 1, 1]
    assert len({ref for refs in used for ref in refs}) == 5
    assert any("no unused trigger is left" in w for w in seen.notes)
    again = ask(Faulty(key, 1000), key, ledger=ledger)
    assert any("were used before" in w for w in again.notes)
    assert sum(use.times for use in ledger.uses()) == 4 * TRIALS


def test_progress_counts_to_the_end(tmp_path):
    for _ in range(2):  # what the log of the first run answers is counted in the second
        told = Told()
        seen = ask(Faulty(owner(), 1000), owner(), log=tmp_path / "log", progress=told)
        total = len(seen.exchanges) + 1
        assert told.stages == [("asking", total)]
        assert told.done == total
