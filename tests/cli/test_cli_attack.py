"""`pathmark attack` and `pathmark robustness` as they are typed."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from verify_helpers import PASSPHRASE

from pathmark.attacks import ATTACKS
from pathmark.attacks.structure import expert_order
from pathmark.cli.main import cli
from pathmark.errors import PathmarkError
from pathmark.evaluate.suites import RATES
from pathmark.front_door.robustness import RobustnessPlan
from pathmark.models import find_routers, load_model


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("PATHMARK_PASSPHRASE", PASSPHRASE)
    return lambda *words: CliRunner().invoke(cli, [str(word) for word in words])


def test_the_list_names_every_attack_with_its_needs(run):
    rows = json.loads(run("attack", "list", "--json").output)
    assert [row["name"] for row in rows] == list(ATTACKS)
    assert {row["origin"] for row in rows} == {"paper", "beyond"}
    text = run("attack", "list").output
    assert all(name in text for name in ATTACKS)


def test_every_attack_says_what_its_adversary_knows():
    for attack in ATTACKS.values():
        assert "adversary" in attack.knowledge, attack.name


def test_an_attacked_folder_is_what_the_attack_says(run, case, tmp_path):
    out = tmp_path / "attacked"
    result = run("attack", "permute-experts", case.marked, "-o", out, "--seed", 5, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["settings"]["seed"] == 5
    old, new = find_routers(load_model(case.marked)), find_routers(load_model(out))
    for before, after in zip(old, new, strict=True):
        order = expert_order(5, before.layer, before.n_experts)
        assert (after.weight == before.weight[order]).all()
    assert (out / "tokenizer.json").is_file()
    verified = run("verify", out, "--key", case.key_file, "--json")
    assert json.loads(verified.output)["marked"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["average", "MARKED", "-o", "OUT"], "--original"),
        (["unlearn", "MARKED", "-o", "OUT"], "--key"),
        (["router-noise", "MARKED", "-o", "OUT"], "no weights to write"),
        (["remove-experts", "MARKED", "-o", "OUT", "--share", "1.5"], "share"),
        (["rotate", "MARKED", "-o", "MARKED"], "already exists"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(run, case, tmp_path, words, message):
    places = {"MARKED": case.marked, "OUT": tmp_path / "out"}
    result = run("attack", *(places.get(word, word) for word in words))
    assert isinstance(result.exception, PathmarkError)
    assert message in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_robustness_writes_table_plot_and_results(run, case, tmp_path):
    out = tmp_path / "robustness"
    words = ["robustness", case.marked, "--key", case.key_file, "-o", out, "--only", "shift-routers", "--n-texts", 20]
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert "router shift" in result.output
    assert {path.name for path in out.iterdir()} == {"results.json", "table.md", "evidence.png"}
    again = json.loads(run(*words, "--json").output)
    assert [row["case"] for row in again["rows"]] == ["none", "router shift"]
    assert again["rows"][0]["marked"]
    page = tmp_path / "robustness.html"
    assert run("report", out / "results.json", "-o", page).exit_code == 0
    assert "router shift" in page.read_text()


def test_robustness_refuses_attacks_that_do_not_exist(run, case, tmp_path):
    words = ["robustness", case.marked, "--key", case.key_file, "-o", tmp_path / "x", "--only"]
    assert "there is no attack 'nonsense'" in str(run(*words, "nonsense").exception)
    assert "--only and --skip" in str(run(*words, "rotate", "--skip", "rotate").exception)


def test_rows_are_chosen_by_name_and_what_needs_a_sweep_brings_it_along():
    cell = "fine-tuning, router, 3,000 samples, best rate"

    def names(**how):
        return [case.name for case in RobustnessPlan(**how).cases()]

    whole = names(only=(cell,))
    assert (len(whole), whole[0], whole[-1]) == (2 + len(RATES), "none", cell)
    one = "fine-tuning, router, 500 samples, rate 0.001"
    assert names(only=(one, cell)) == ["none", one, cell]
    assert names(only=("rotate",)) == ["none", "rotation of the residual stream"]
    assert "rotation and fine-pruning 25 %" in names(only=("rotate", "fine-prune"))
    assert "4 bit and 3 epochs of fine-tuning" not in names(only=("gptq",))
    assert cell not in names(skip=(cell,))
    assert one in names(skip=(cell,))
