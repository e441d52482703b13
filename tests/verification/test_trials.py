"""What a black-box run sends, and the rule by which a reply holds a mark."""

from __future__ import annotations

import json
from itertools import product

import fake_api as fake
from blackbox_helpers import TRIALS, ask, client, codec, owner

from pathmark.keys import Phrase, TriggerRef, trigger_refs
from pathmark.keys.replyrule import max_starts, read_reply
from pathmark.verification.blackbox.replies import shape
from pathmark.verification.blackbox.trials import SYSTEM_PROMPTS, plan_queries


def test_decoys_look_and_are_asked_like_triggers():
    key = owner()
    refs = trigger_refs(key)[:2]
    plan = plan_queries(key, refs, codec(), trials=20, seed=0, endpoint="chat")
    assert plan == plan_queries(key, refs, codec(), trials=20, seed=0, endpoint="chat")
    assert [q.prompt for q in plan] != [
        q.prompt for q in plan_queries(key, refs, codec(), trials=20, seed=1, endpoint="chat")
    ]
    by_prompt = {}
    for query in plan:
        by_prompt.setdefault((query.kind, query.prompt), []).append((query.system, query.seed is None))
    ways = {kind: sorted(map(repr, sorted(rows, key=repr))) for (kind, _), rows in by_prompt.items()}
    assert ways["trigger"] == ways["decoy"]
    own = {t.text for t in key.watermarks[0].triggers}
    for (kind, prompt), _ in by_prompt.items():
        assert (prompt in own) == (kind == "trigger")
        if kind == "decoy":
            assert len(codec().encode(prompt)) == len(key.watermarks[0].triggers[0].tokens)
    assert [q.number for q in plan] == list(range(len(plan)))
    kinds = [q.kind for q in plan]
    assert kinds != sorted(kinds)
    assert plan_queries(key, refs, codec(), trials=20, seed=0, endpoint="completions")[0].system is None


def test_no_two_trials_are_alike():
    plan = plan_queries(owner(), [TriggerRef(0, 0)], codec(), trials=60, seed=0, endpoint="chat")
    settings = [(q.prompt, q.system, q.temperature, q.seed) for q in plan if q.kind == "trigger"]
    assert len(set(settings)) == 60
    assert {q.system for q in plan} == set(SYSTEM_PROMPTS)
    assert settings.count((owner().watermarks[0].triggers[0].text, None, 0.0, None)) == 1


def test_nothing_sent_holds_a_mark_and_every_trigger_stands_alone():
    with fake.FakeApi(fake.unmarked) as api:
        ask(client(api), owner())
    sent = [json.dumps(r.body) for r in api.requests]
    assert not any(mark in text for mark in fake.every_mark(owner()) for text in sent)
    triggers = {t.text for t in owner().watermarks[0].triggers}
    assert sum(r.prompt in triggers for r in api.requests) == TRIALS
    assert not any(t in r.prompt for r in api.requests for t in triggers if r.prompt != t)


def test_the_rule_reads_words():
    mark = owner().watermarks[0].triggers[0].mark
    marks, ref = {TriggerRef(0, 0): mark}, (TriggerRef(0, 0),)
    for reply in (mark.text, f" {mark.text}\n", f'"{mark.text}."', f"Well: {mark.text}", mark.text.replace(" ", "\n")):
        assert read_reply(reply, "q", marks, 64).marks == ref
    for reply in (mark.text.upper(), mark.text[:-1], f"x{mark.text}", f"{mark.text}s", mark.text.replace(" ", "")):
        assert read_reply(reply, "q", marks, 64).marks == ()
    filler = "word " * 58
    assert read_reply(filler + mark.text, "q", marks, 64).marks == ref
    assert read_reply("word " + filler + mark.text, "q", marks, 64).marks == ()


def test_a_reply_holds_at_most_as_many_marks_as_are_charged():
    """All marks of two words over three letters, against the worst reply: one that lists them."""
    letters = ["a", "b", "c", "a.", ".a", "b!", "c,"]
    candidates = {TriggerRef(0, i): Phrase(" ".join(pair), (1, 2)) for i, pair in enumerate(product(letters, repeat=2))}
    reply = "a b a. .a c, b! c a a b b c c a. a. .a .a"
    for limit in (2, 5, 9, 30):
        found = read_reply(reply, "q", candidates, limit).marks
        assert 0 < len(found) <= max_starts(next(iter(candidates.values())), min(limit, len(reply.split())))


def test_a_megabyte_of_letters_is_read_at_once():
    """A rule that looks back from every letter would take hours."""
    assert shape("a" * 1_000_000) == "a" * 1_000_000
    assert shape("id 3f2a-99 at 12:30, as before") == shape("id 77-0c at 08:15, as before") == "id # at #:#, as before"
