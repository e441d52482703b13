"""Looking for the trigger and forging claims, as parts of a robustness run."""

from __future__ import annotations

import pytest

from pathmark.attacks.kit import Kit
from pathmark.attacks.search import TriggerSearch
from pathmark.evaluate.adversaries import forge_claims, look_for_trigger
from pathmark.models import bundled_segments, load_model, load_tokenizer
from pathmark.models.describe import describe_model
from pathmark.progress import Silent
from pathmark.reporting.robustness import adversaries
from pathmark.verification.paths.alignment import profile_texts

BUDGET = TriggerSearch(
    vocabulary=60, random_sequences=24, restarts=1, steps=2, candidates=8, confirmed=4, confirm_texts=2, text_tokens=4
)


@pytest.fixture(scope="module")
def found(case):
    model, probes = load_model(case.marked), profile_texts(case.key)
    kit = Kit(tokenizer=load_tokenizer(case.marked), texts=bundled_segments()[:40])
    facts, codec, _ = describe_model(str(case.marked))
    forged = forge_claims(model, case.key, facts, codec, probes, paths=2_000, secrets=5, progress=Silent())
    return {"searches": [look_for_trigger(model, case.key, kit, probes, BUDGET)], "forgery": forged}


def test_a_search_states_its_budget_and_keeps_prefixes_to_itself(found, case):
    (search,) = found["searches"]
    assert search["tried"]["single token"] == 60
    assert search["tokens"] > 0
    assert search["complete"]
    assert str(list(case.key.watermarks[0].triggers[0].tokens)) not in str(search)
    assert all(not isinstance(value, list) or all(isinstance(v, str) for v in value) for value in search.values())


def test_no_forged_claim_is_accepted_and_all_ways_are_there(found):
    forged = found["forgery"]
    assert len(forged) == 8
    assert not any(row["accepted"] for row in forged)
    assert min(row["log10_p"] for row in forged[:3]) < -1  # at face value they would impress


def test_both_stand_in_the_page(found):
    page = adversaries(found)
    assert "Search for the trigger: " in page
    assert page.count("| refused |") == 8
    assert adversaries({"rows": []}) == ""
