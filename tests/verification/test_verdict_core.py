"""What all verdicts share: criteria that are checked, one JSON core, and rooms that don't know each other."""

from __future__ import annotations

import ast
import json
from importlib.resources import files
from pathlib import Path

import fake_api as fake
import jsonschema
import pytest
from blackbox_helpers import owner, verdict_of
from verify_helpers import dated

import pathmark.verification
from pathmark.errors import VerificationError
from pathmark.models import load_model
from pathmark.stats import Family, PValue
from pathmark.verification import Anchor, AskConfig, Criteria, judge, judge_anchor, profile_texts, record_evidence

ROOM = Path(pathmark.verification.__file__).parent
SCHEMAS = {
    name: json.loads(files("pathmark.verification").joinpath(f"{name}.schema.json").read_text())
    for name in ("verify", "blackbox")
}
SCHEMAS["scheme"] = json.loads(files("pathmark.baselines").joinpath("scheme.schema.json").read_text())


@pytest.fixture(scope="module")
def evidence(case):
    return record_evidence(load_model(case.marked), case.key, profile_texts(case.key)[:4])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Criteria(significance=0), "significance level lies between 0 and 1, got 0"),
        (lambda: Criteria(significance=1), "got 1; try 1e-6"),
        (lambda: Criteria(gamma=0), "the paper uses 0.8"),
        (lambda: Criteria(gamma=1.1), "got 1.1"),
        (lambda: AskConfig(trials=0), "at least one trial"),
        (lambda: AskConfig(max_tokens=0), "at least one token"),
        (lambda: AskConfig(triggers=0), "at least one trigger"),
        (lambda: AskConfig(triggers=()), "at least one trigger"),
    ],
)
def test_settings_are_checked_where_they_live(make, said):
    with pytest.raises(VerificationError, match=said):
        make()


def test_criteria_say_who_decides(case):
    p = PValue(-30)
    fixed, undated = Anchor(True, "dated", 90), judge_anchor(case.key)
    assert Criteria().of(case.key).anchor == undated
    assert Criteria(anchor=fixed).of(case.key).anchor is fixed
    assert Criteria(anchor=undated).deciding(p) == p
    assert Criteria(anchor=undated, strict=True).deciding(p) == undated.p(p) > p
    assert Criteria(anchor=fixed, strict=True).deciding(p) == p


def test_both_kinds_share_one_core(case, evidence):
    criteria = Criteria(significance=1e-4, strict=True, family=Family(suspects=3), anchor=dated(case.key))
    path = judge(case.key, evidence, criteria=criteria, notes=["a note"])
    reply = verdict_of(
        fake.marked(owner()), significance=1e-4, strict=True, family=criteria.family, anchor=criteria.anchor
    )
    core = SCHEMAS["verify"]["$defs"]["core"]
    assert core == SCHEMAS["blackbox"]["$defs"]["core"] == SCHEMAS["scheme"]["$defs"]["core"]
    assert SCHEMAS["verify"]["$defs"]["probability"] == SCHEMAS["blackbox"]["$defs"]["probability"]
    shared = {"verdict", "marked", "undecided", "strict", "significance", "anchored", "anchor", "family"}
    first, second = path.summary(), reply.summary()
    assert {name: first[name] for name in shared} == {name: second[name] for name in shared}
    assert set(core["required"]) == first.keys() & second.keys()
    tried = {"keys": 1, "watermarks": 1, "ids": 1, "triggers": 1, "statistics": 1, "alignments": 1, "suspects": 3}
    assert first["family"] == tried
    assert first["anchor"] == {"reason": "dated", "charge_bits": 80}
    for name, found in (("verify", first), ("blackbox", second)):
        jsonschema.validate(json.loads(json.dumps(found)), SCHEMAS[name])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({key: value for key, value in found.items() if key != "anchor"}, SCHEMAS[name])
    assert "a note" in first["weaknesses"]


def test_a_level_out_of_reach_is_undecided_and_says_why(case, evidence):
    verdict = judge(case.key, evidence, criteria=Criteria(significance=1e-100))
    assert (verdict.decision, verdict.exit_code, verdict.marked) == ("undecided", 2, False)
    assert "cannot reach the level on this suspect" in verdict.undecided
    assert verdict.words().startswith(f"Undecided.\nNobody can say yes or no: {verdict.undecided}.\n")
    assert verdict.summary()["marked"] is None


def test_rooms_point_one_way():
    """decoys <- paths <- weights, recorded; blackbox has the core only."""
    allowed = {"paths": {"paths"}, "weights": {"paths", "weights"}, "recorded": {"paths", "recorded"}}
    allowed["blackbox"] = {"blackbox"}
    wrong = []
    for file in ROOM.rglob("*.py"):
        if file == ROOM / "__init__.py":
            continue
        room = file.parent.name
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("pathmark.verification."):
                used = node.module.split(".")[2]
                if used in allowed and used not in allowed.get(room, set()):
                    wrong.append(f"{file.relative_to(ROOM)} imports {node.module}")
    assert len(list(ROOM.iterdir())) > 6
    assert not wrong
