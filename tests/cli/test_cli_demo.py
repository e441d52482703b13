"""`pathmark demo` with few steps: the whole story, its folder, and commands that work as printed."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from click.testing import CliRunner

from pathmark.cli.main import cli
from pathmark.models import bundled_probes
from pathmark.release.scan import ScanConfig


@pytest.fixture
def quick(monkeypatch):
    """Few prefixes to scan, few texts to train and to measure on; everything else as in the real demo."""
    from dataclasses import replace

    from pathmark.embedding import default_config
    from pathmark.release import marking

    monkeypatch.setattr("pathmark.evaluate.demo.bundled_probes", lambda: bundled_probes()[:20])
    monkeypatch.setattr("pathmark.front_door.demo.default_config", lambda: replace(default_config(), texts=24))
    monkeypatch.setattr("pathmark.release.scan.WHOLE_VOCABULARY", 200)
    check = marking.self_check
    few = ScanConfig(random_sequences=5, per_count=2)
    monkeypatch.setattr(marking, "self_check", lambda *given, **named: check(*given, **{**named, "scan": few}))


def test_the_demo_tells_its_story_and_prints_commands_that_work(quick, tmp_path):
    folder = tmp_path / "demo"
    result = CliRunner().invoke(cli, ["demo", "-o", str(folder), "--steps", "2"])
    assert result.exit_code == 1, result.output  # two steps put no mark in
    for part in ("1. A lab owns bundled:tiny", "5. The lab examines four models", "Whose copy leaked?"):
        assert part in result.output
    assert {path.name for path in folder.iterdir()} >= {
        "owner.key", "beta.key", "passphrase.txt", "licensees.db", "marked", "stolen", "results.json", "report.html"
    }  # fmt: skip
    assert "not fit for release" in (folder / "report.html").read_text()
    phrase = (folder / "passphrase.txt").read_text().strip()
    printed = [shlex.split(line)[1:] for line in result.output.splitlines() if re.match(r"  \S+ (verify|trace) ", line)]
    assert [words[0] for words in printed] == ["verify", "trace"]
    for words in printed:
        again = CliRunner().invoke(cli, [*words, "--n-texts", "6", "--json"], env={"PATHMARK_PASSPHRASE": phrase})
        assert again.exit_code in (0, 1), again.output
        assert json.loads(again.stdout)["suspect"] == str(folder / "stolen")
    refused = CliRunner().invoke(cli, ["demo", "-o", str(folder)])
    assert "already exists" in str(refused.exception)
