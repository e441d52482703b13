"""`pathmark reproduce`: its list, its mistakes, and one whole run on a small model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from test_cli_terminal import follows_schema

from pathmark.cli.main import cli
from pathmark.errors import PathmarkError
from pathmark.results.experiment import read_experiment
from pathmark.results.paper import papers
from test_house import HEAVY


def test_the_list_tells_minutes_and_loads_nothing_heavy():
    done = CliRunner().invoke(cli, ["reproduce", "list"])
    assert done.exit_code == 0
    assert all(name in done.output for name in papers())
    told = json.loads(CliRunner().invoke(cli, ["reproduce", "list", "--json"]).output)
    follows_schema("reproduce", told)
    assert [one["name"] for one in told["experiments"]] == list(papers())
    code = (
        "import sys\nfrom pathmark.cli.main import cli\n"
        "cli.main(['reproduce', 'list'], standalone_mode=False)\nprint({m.split('.')[0] for m in sys.modules})"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not any(f"'{name}'" in loaded for name in HEAVY)


@pytest.mark.parametrize(
    ("words", "told"),
    {
        "reproduce tab-witebox": "did you mean tab-whitebox",
        "reproduce tab-whitebox --corpora nosuch.toml": "cannot read nosuch.toml",
        "reproduce tab-whitebox --model ./nosuch": "'./nosuch' does not exist",
    }.items(),
)
def test_mistakes_are_told_in_one_line_and_nothing_is_left_behind(words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PathmarkError, match=told):
        cli.main(words.split(), standalone_mode=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_everything_runs_in_its_quick_form_on_the_bundled_model(tmp_path, monkeypatch):
    from pathmark.models import bundled_segments

    monkeypatch.chdir(tmp_path)
    lines = [text.replace("\n", " ") for text in bundled_segments()]
    corpora = ""
    for name, start in (("wikitext", 0), ("ptb", 900)):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines[start : start + 700]))
        (tmp_path / f"{name}-test.txt").write_text("\n".join(lines[start + 700 : start + 900]))
        corpora += f'[{name}]\ntrain = "{name}.txt"\ntest = "{name}-test.txt"\n'
    (tmp_path / "c4.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines[1800:2100]))
    (tmp_path / "corpora.toml").write_text(corpora + '[c4]\nprefixes = "c4.jsonl"\n')
    done = CliRunner().invoke(cli, ["reproduce", "all", "--quick", "--corpora", "corpora.toml", "--json"])
    assert done.exit_code == 0
    follows_schema("reproduce", json.loads(done.stdout))
    for name in papers():
        result = read_experiment(tmp_path / "reproduced-quick" / f"{name}.json")
        if name != "tab-fidelity":  # needs lm-eval
            assert result.points, result.missing
    assert (tmp_path / "reproduced-quick" / "report.md").read_text().count("\n## ") == len(papers())
