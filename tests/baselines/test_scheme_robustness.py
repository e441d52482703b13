"""Attacks on another scheme's mark: the same suite as on ours, judged by the scheme."""

from __future__ import annotations

import json
from importlib.resources import files

import jsonschema
import pytest
import torch
from scheme_helpers import TEXTS, Words, config_of, key_of, small_model

from pathmark.attacks.kit import Kit
from pathmark.baselines import find_scheme
from pathmark.errors import AttackError
from pathmark.evaluate.scheme_robustness import SchemeSuspects
from pathmark.evaluate.stolen import RESULTS, RobustnessConfig, Sources, run_suite
from pathmark.evaluate.suites import Case, step
from pathmark.reporting.scheme_robustness import scheme_table
from pathmark.results.schema import to_json
from pathmark.results.schemes import read_scheme_robustness

SETTINGS = {"bits": 24, "steps": 40, "lr": 0.01, "length": 24, "batch_size": 4}
SOURCES = Sources(model_sha256="0" * 64)
CASES = (
    Case("none", ()),
    Case("expert permutation", (step("permute-experts"),)),
    Case("noise", (step("weight-noise", scale=2.0),)),
    Case("unlearning", (step("unlearn"),)),
)


@pytest.fixture(scope="module")
def marked():
    return find_scheme("eaaw").embed(small_model(), Words(), config_of("eaaw", **SETTINGS), TEXTS)


def suspects_of(model, name="eaaw", number=0, **settings):
    kit = Kit(tokenizer=Words(), texts=TEXTS)
    config = config_of(name, number, **settings)
    key, scheme = key_of(name, number, **settings), find_scheme(name)
    return SchemeSuspects(model, key, kit, RobustnessConfig(n_probes=8), scheme, config, TEXTS[:20])


def test_every_attack_is_measured_by_the_scheme(marked, tmp_path):
    before = {name: tensor.clone() for name, tensor in marked.state_dict().items()}
    result = run_suite(suspects_of(marked, **SETTINGS), CASES, tmp_path, SOURCES)
    rows = {row.case: row for row in result.rows}
    assert (rows["none"].wsr.hits, rows["none"].wsr.n) == (24, 24)
    assert rows["none"].ppl_change == pytest.approx(0)
    assert rows["expert permutation"].marked
    assert not rows["noise"].marked
    assert rows["noise"].ppl_thief is not None
    assert rows["unlearning"].status == "refused"  # there are no target experts to know
    assert all(torch.equal(tensor, before[name]) for name, tensor in marked.state_dict().items())
    assert read_scheme_robustness(tmp_path / RESULTS) == result
    published = json.loads(files("pathmark.cli").joinpath("output.schema.json").read_text())["$defs"]
    jsonschema.validate(to_json(result), published["robustness --scheme"])
    table = scheme_table(result)
    assert "| none | 24/24 = 100.0 % [85.8, 100.0] | 6.0e-08 |" in table
    assert "| **lost** |" in table or "| destroyed |" in table
    assert "refused: " in table


def test_a_run_goes_on_and_another_one_is_refused(marked, tmp_path):
    first = run_suite(suspects_of(marked, **SETTINGS), CASES[:2], tmp_path, SOURCES)
    again = run_suite(suspects_of(marked, **SETTINGS), CASES[:2], tmp_path, SOURCES)
    assert again == first  # seconds included: nothing was measured twice
    with pytest.raises(AttackError, match="holds another measurement, which differs in key"):
        run_suite(suspects_of(marked, number=1, **SETTINGS), CASES[:2], tmp_path, SOURCES)


def test_what_is_not_there_cannot_be_attacked(marked, tmp_path):
    with pytest.raises(AttackError, match="does not carry this key's mark"):
        run_suite(suspects_of(small_model(), **SETTINGS), CASES, tmp_path, SOURCES)
    with pytest.raises(AttackError, match="kgw changes no weights"):
        suspects_of(marked, "kgw")
