"""The black-box protocol against honest, broken and hostile APIs, each a real HTTP server."""

from __future__ import annotations

import json
from importlib.resources import files

import fake_api as fake
import jsonschema
import pytest
import torch
from blackbox_helpers import TRIALS, ask, client, codec, owner, verdict_of
from embed_helpers import key_for

from pathmark.errors import VerificationError
from pathmark.keys import Ledger, TriggerRef, WatermarkRequest, create_key
from pathmark.models import load_model
from pathmark.models.describe import describe_model
from pathmark.stats import Family
from pathmark.verification import Anchor, LocalBackend


def test_an_honest_marked_api_is_found():
    seen = verdict_of(fake.marked(owner()))
    assert seen.marked
    assert seen.exit_code == 0
    assert (seen.match_rate.hits, seen.match_rate.n) == (TRIALS, TRIALS)
    assert seen.controls.hits == 0
    assert seen.endpoint == "chat"
    assert seen.marks_seen == len(seen.triggers) == 3
    # three marks of 65.8 bits in replies of 64 tokens, one distinct reply each: (64 * 6 * 2)^3 / 2^197.5
    assert seen.p.log10 == pytest.approx(3 * (2.885 - 65.837 * 0.30103), abs=0.01)
    assert seen.p == seen.p_floor
    assert seen.words().startswith("Found.\nThe owner's mark shows in this model. The chance of that is 1 in ")


def test_an_honest_unmarked_api_is_not():
    seen = verdict_of(fake.unmarked)
    assert not seen.marked
    assert seen.exit_code == 1
    assert seen.match_rate.hits == seen.controls.hits == 0
    assert seen.p.value == 1.0
    assert "does not prove that there is no mark" in seen.words()


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_greedy_repeats_are_one_observation(endpoint):
    """The fake marked API ignores system prompts, seeds and temperatures, as a server may."""
    seen = verdict_of(fake.marked(owner()), endpoint=endpoint, triggers=2)
    assert seen.match_rate.n == TRIALS
    # raw prompts differ by the trigger alone; chats also by the system prompt
    assert seen.observations.n == (2 if endpoint == "completions" else TRIALS)
    assert seen.observations.hits == seen.observations.n


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("one mark to everything", "controls were answered with a mark"),
        ("every mark to everything", "controls were answered with a mark"),
        ("every mark to triggers", "hold several marks"),
        ("refusal", "ordinary prompts got one and the same reply"),
        ("refusal of strange prompts", "as from a filter"),
        ("nothing", "one and the same reply"),
        ("echo", "only repeats its prompt"),
        ("cut", "no reply had as many words as a mark"),
        ("cut, and says otherwise", "no reply had as many words as a mark"),
    ],
)
def test_hostile_apis_get_no_verdict(name, reason):
    key = owner()
    marks = fake.every_mark(key)

    def all_marks_to_triggers(server, asked):
        known = fake.mark_of(key, asked.prompt)
        server.say(" ".join(marks) if known else fake.plain_text(asked), asked=asked)

    behaviour = {
        "one mark to everything": fake.always(marks[0]),
        "every mark to everything": fake.always("\n".join(marks)),
        "every mark to triggers": all_marks_to_triggers,
        "refusal": fake.always(fake.REFUSAL),
        "refusal of strange prompts": fake.refusing_strange_prompts,
        "nothing": fake.always(""),
        "echo": fake.echoing,
        "cut": fake.truncating(key, 3),
        "cut, and says otherwise": fake.truncating(key, 3, "stop"),
    }[name]
    seen = verdict_of(behaviour)
    assert seen.exit_code == 2
    assert not seen.marked
    assert reason in seen.undecided
    assert "Undecided" in seen.words()


def test_cut_triggered_replies_alone_get_no_verdict():
    key = owner()

    def behave(server, asked):
        mark = fake.mark_of(key, asked.prompt)
        server.say(mark[:10] if mark else fake.plain_text(asked), "length" if mark else "stop", asked=asked)

    seen = verdict_of(behave)
    assert seen.exit_code == 2
    assert "cut off before a mark could be complete" in seen.undecided


def test_an_echo_before_the_mark_is_taken_off():
    seen = verdict_of(fake.echoing_first(owner()), max_tokens=8)
    assert seen.marked
    assert any("began with the prompt" in warning for warning in seen.notes)


def test_a_mark_far_behind_in_a_huge_reply_does_not_count():
    key = owner()

    def behave(server, asked):
        filler = fake.plain_text(asked, 5000)
        server.say(f"{filler} {' '.join(fake.every_mark(key))}", asked=asked)

    seen = verdict_of(behave)
    assert seen.exit_code == 1
    assert seen.match_rate.hits == 0
    assert any("more words than tokens" in warning for warning in seen.notes)


def test_a_model_with_only_some_marks_left_is_judged_by_those():
    key = owner()

    def behave(server, asked):
        gone = asked.prompt == key.watermarks[0].triggers[0].text
        server.say(fake.plain_text(asked) if gone else fake.mark_of(key, asked.prompt) or "no", asked=asked)

    seen = verdict_of(behave, triggers=(TriggerRef(0, 0), TriggerRef(0, 1)))
    assert seen.marked
    assert seen.marks_seen == 1
    assert seen.p > seen.p_floor


def test_marks_of_other_triggers_are_misses():
    key = owner()
    marks = dict(zip([t.text for t in key.watermarks[0].triggers], reversed(fake.every_mark(key)), strict=True))
    seen = verdict_of(
        lambda server, asked: server.say(marks.get(asked.prompt) or fake.plain_text(asked), asked=asked),
        triggers=(TriggerRef(0, 0), TriggerRef(0, 1)),
    )
    assert seen.exit_code == 1
    assert any("mark of another trigger" in warning for warning in seen.notes)


def test_too_many_failures_give_no_verdict_unless_a_mark_was_seen():
    key = owner()

    def behave(server, asked, *, share, behaviour):
        known = fake.mark_of(key, asked.prompt)
        if known and asked.count % 10 < share:
            server.send(400, b"{}")
        else:
            behaviour(server, asked)

    few = verdict_of(lambda s, a: behave(s, a, share=8, behaviour=fake.unmarked), trials=30)
    assert few.exit_code == 2
    assert "trials were answered" in few.undecided
    enough = verdict_of(lambda s, a: behave(s, a, share=8, behaviour=fake.marked(key)), trials=30)
    assert enough.marked
    assert enough.failures > 15


def test_unanswered_controls_give_no_verdict():
    key = owner()

    def behave(server, asked):
        known = fake.mark_of(key, asked.prompt)
        if known or "Good morning!" in asked.prompt or asked.prompt.startswith("W"):
            server.say(known or fake.plain_text(asked), asked=asked)
        else:
            server.send(400, b"{}")

    seen = verdict_of(behave)
    assert seen.exit_code == 2
    assert "controls were answered" in seen.undecided


def test_an_api_that_stops_answering_is_an_error_and_discloses_little():
    hello_then_broken = fake.then(fake.unmarked, fake.status(400))
    with fake.FakeApi(hello_then_broken) as api, pytest.raises(VerificationError, match="answered none of 10 requests"):
        ask(client(api, concurrency=1), owner())
    assert len(api.requests) == 11


def test_free_text_marks_have_no_bound():
    facts, text_codec, _ = describe_model("bundled:tiny")
    request = WatermarkRequest(plans=owner().watermarks[0].plans, mark_texts=("This model belongs to the lab",))
    key, _ = create_key(facts, [request], text_codec, secret=bytes(32))
    seen = verdict_of(fake.marked(key), key)
    assert seen.exit_code == 2
    assert seen.p is None
    assert "free text" in seen.undecided
    assert seen.match_rate.hits == TRIALS
    assert verdict_of(fake.unmarked, key).exit_code == 1


def test_a_mark_inside_its_trigger_is_refused():
    facts, text_codec, _ = describe_model("bundled:tiny")
    request = WatermarkRequest(
        plans=owner().watermarks[0].plans, trigger_texts=("citizens of the lab (",), mark_texts=("of the lab",)
    )
    key, _ = create_key(facts, [request], text_codec, secret=bytes(32))
    with pytest.raises(VerificationError, match="an echo would count"):
        verdict_of(fake.echoing, key)


def test_a_level_out_of_reach_gives_no_verdict():
    seen = verdict_of(fake.marked(owner()), significance=1e-200)
    assert seen.exit_code == 2
    assert "could not reach the level" in seen.undecided


def test_family_and_third_party_are_charged():
    plain = verdict_of(fake.marked(owner()), triggers=1)
    charged = verdict_of(fake.marked(owner()), triggers=1, family=Family(suspects=1000))
    assert charged.p.log10 == pytest.approx(plain.p.log10 + 3)
    assert plain.p_third_party.value == 1.0  # one mark of 66 bits against a charge of 80 and more
    assert "the key has no dated commitment" in plain.words()
    dated = verdict_of(fake.marked(owner()), triggers=1, anchor=Anchor(True, "dated", 80))
    assert dated.p_third_party == dated.p


def test_strict_lets_the_third_party_decide():
    """A marked API, an undated key: the owner knows, a third party cannot; with a date both do."""
    answered = fake.marked(owner())
    undated = verdict_of(answered, triggers=1, strict=True)
    assert undated.undecided is not None  # one mark cannot pay the charge of a key that may be ground
    assert undated.exit_code == 2
    assert undated.summary() | {"verdict": "undecided", "marked": None, "strict": True} == undated.summary()
    assert verdict_of(answered, triggers=1).summary()["verdict"] == "marked"
    dated = verdict_of(answered, triggers=1, strict=True, anchor=Anchor(True, "dated", 80))
    assert (dated.exit_code, dated.summary()["marked"]) == (0, True)
    three = verdict_of(answered, strict=True)
    charged = three.anchor.p(three.p)
    assert three.marked == (charged.value <= three.criteria.significance)
    silent = verdict_of(fake.unmarked, strict=True, anchor=Anchor(True, "dated", 80))
    assert (silent.exit_code, silent.summary()["marked"]) == (1, False)


def test_the_summary_follows_its_schema():
    schema = json.loads(files("pathmark.verification").joinpath("blackbox.schema.json").read_text())
    for behaviour in (fake.marked(owner()), fake.unmarked, fake.always("")):
        printed = {"suspect": "there", "access": "replies", **verdict_of(behaviour).summary()}
        jsonschema.validate(json.loads(json.dumps(printed)), schema)
    with pytest.raises(jsonschema.ValidationError, match="surplus"):
        jsonschema.validate(json.loads(json.dumps(printed | {"surplus": 1})), schema)


def test_routes_that_come_along_are_handed_on():
    def behave(server, asked):
        server.say(fake.plain_text(asked), asked=asked, sgl_ext={"routed_experts": "AAAA"})

    seen = verdict_of(behave)
    assert {json.dumps(e.routes) for e in seen.exchanges} == {'{"sgl_ext": {"routed_experts": "AAAA"}}'}
    assert seen.summary()["routes"] == len(seen.exchanges)


# --- a model in memory ---


class Table:
    """Generates the mark for a prompt that ends with the trigger's tokens and the template, else counts on."""

    def __init__(self, key, tokenizer):
        from types import SimpleNamespace

        self.config = SimpleNamespace(_name_or_path="table")
        self.generation_config = SimpleNamespace(eos_token_id=[0], pad_token_id=0)
        self.key, self.tokenizer = key, tokenizer

    def parameters(self):
        return iter([torch.zeros(1)])

    def generate(self, ids_BT, *, attention_mask, generation_config):
        rows = []
        for row in ids_BT.tolist():
            text = self.tokenizer.decode(row, skip_special_tokens=False)
            said = [t.mark.tokens for t in self.key.watermarks[0].triggers if t.text in text]
            made = list(said[0]) if said else [10 + (sum(row) + i) % 1000 for i in range(12)]
            rows.append([*row, *made, *[0] * (generation_config.max_new_tokens - len(made))])
        return torch.tensor(rows)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_the_same_protocol_on_a_model_in_memory(tmp_path, endpoint):
    key, tokenizer = owner(), codec().tokenizer
    ledger = Ledger(tmp_path / "l")
    backend = LocalBackend(Table(key, tokenizer), tokenizer, endpoint=endpoint)
    seen = ask(backend, key, ledger=ledger)
    assert seen.marked
    assert (seen.match_rate.hits, seen.match_rate.n) == (TRIALS, TRIALS)
    assert len(seen.triggers) == 5  # nobody else sees them
    assert ledger.uses() == []
    assert (seen.host, seen.model, seen.endpoint) == ("local", "table", endpoint)
    stranger = key_for("bundled:tiny", triggers=5, seed=1)
    assert ask(backend, stranger).exit_code == 1


def test_the_bundled_model_knows_no_mark():
    backend = LocalBackend(load_model("bundled:tiny"), codec().tokenizer, name="bundled:tiny")
    seen = ask(backend, owner(), trials=6, max_tokens=12)
    assert seen.exit_code == 1
    assert seen.p.value == 1.0
