"""Looking for the trigger and forging claims, as parts of a robustness run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pathmark.attacks.kit import Kit
from pathmark.attacks.search import TriggerSearch
from pathmark.evaluate.adversaries import ForgersBudget, forge_claims, look_for_trigger
from pathmark.models import bundled_segments, load_model, load_tokenizer
from pathmark.models.describe import describe_model
from pathmark.progress import Silent
from pathmark.reporting.robustness import forgeries, searches
from pathmark.results import Header, RobustnessResult
from pathmark.results.schema import from_json, to_json
from pathmark.verification.paths.alignment import profile_texts

BUDGET = TriggerSearch(
    vocabulary=60, random_sequences=24, restarts=1, steps=2, candidates=8, confirmed=4, confirm_texts=2, text_tokens=4
)

HEADER = Header(
    format="a test", version=2, package="0", torch=None, model_sha256=None, original_sha256=None, texts_sha256={},
    key=None, seed=0, n_probes=4, settings={},
)  # fmt: skip
EMPTY = RobustnessResult(header=HEADER, corpus="bundled", n_texts=40, layers=())


@pytest.fixture(scope="module")
def found(case):
    model, probes = load_model(case.marked), profile_texts(case.key)
    kit = Kit(tokenizer=load_tokenizer(case.marked), texts=bundled_segments()[:40])
    facts, codec, _ = describe_model(str(case.marked))
    forged = forge_claims(model, case.key, facts, codec, probes, ForgersBudget(paths=2_000, secrets=5), Silent())
    return replace(EMPTY, searches=(look_for_trigger(model, case.key, kit, probes, BUDGET),), forgery=tuple(forged))


def test_a_search_states_its_budget_and_keeps_prefixes_to_itself(found, case):
    (search,) = found.searches
    assert search.tried["single token"] == 60
    assert search.tokens > 0
    assert search.complete
    written = to_json(search)
    assert str(list(case.key.watermarks[0].triggers[0].tokens)) not in str(written)
    assert all(not isinstance(value, list) or all(isinstance(v, str) for v in value) for value in written.values())


def test_no_forged_claim_is_accepted_and_all_ways_are_there(found):
    forged = found.forgery
    assert len({row.name for row in forged}) == len(forged) >= 35
    assert [row.name for row in forged if row.accepted] == []
    assert all(row.reason for row in forged)
    assert min(row.log10_p for row in forged[:3]) < -1  # at face value they would impress


def test_every_forged_claim_stands_in_the_page_on_threats(found):
    page = (Path(__file__).parents[2] / "docs" / "threats.md").read_text()
    table = page.partition("## Forged claims")[2].partition("\n## ")[0]
    named = {line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ") and "**" not in line}
    carried_out = {re.sub(r"\d[\d,]*(?<!,)", "N", row.name) for row in found.forgery}
    assert carried_out == named - {"forged claim"}
    folder = Path(__file__).parents[1]
    tests = {path.stem for path in folder.rglob("test_*.py")}
    assert set(re.findall(r"\btest_\w+", table.replace("test_adversaries.py", ""))) <= tests


def test_both_stand_in_the_page(found):
    assert searches([found]).count("The trigger was not found.") == len(found.searches) > 0
    assert forgeries([found]).count("| refused |") == len(found.forgery)
    assert searches([EMPTY]) == forgeries([EMPTY]) == ""
    assert from_json(RobustnessResult, json.loads(json.dumps(to_json(found)))) == found
