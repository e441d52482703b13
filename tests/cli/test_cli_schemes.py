"""`--scheme` on the command line: key, mark and verdict of another scheme, and what it refuses."""

from __future__ import annotations

import json
from importlib.resources import files

import jsonschema
import pytest
from click.testing import CliRunner
from embed_helpers import save_family
from test_cli_terminal import follows_schema

from pathmark.cli.main import cli

QUICK = "--set samples=6 --set tokens=50 --set prompt_tokens=16"
SCHEMA = json.loads(files("pathmark.baselines").joinpath("scheme.schema.json").read_text())


def run(line):
    return CliRunner().invoke(cli, line.split())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small model, and a key of KGW for it."""
    folder = tmp_path_factory.mktemp("schemes")
    save_family(folder / "base", "qwen3_moe")
    made = run(f"keygen {folder}/base --scheme kgw {QUICK} --plain -o {folder}/kgw.key --json")
    assert made.exit_code == 0, made.output
    follows_schema("keygen --scheme", json.loads(made.stdout))
    return folder


def test_from_the_key_to_the_verdict(place):
    done = run(f"embed {place}/base --scheme kgw --key {place}/kgw.key -o {place}/marked --json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    follows_schema("embed --scheme", told)
    assert told["check"]["marked"]
    assert told["changed_tensors"] == 0
    weights = [(place / name / "model.safetensors").read_bytes() for name in ("base", "marked")]
    assert weights[0] == weights[1]
    assert (place / "marked" / "generation_config.json").stat().st_mode & 0o777 == 0o600

    found = run(f"verify {place}/marked --scheme kgw --key {place}/kgw.key --json")
    assert found.exit_code == 0, found.output
    follows_schema("verify --scheme", json.loads(found.stdout))
    jsonschema.validate(json.loads(found.stdout), SCHEMA)
    absent = run(f"verify {place}/base --scheme kgw --key {place}/kgw.key")
    assert absent.exit_code == 1
    assert "Not found." in absent.output
    assert "texts of 50 tokens with z >= 4: 0/6" in absent.output


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("keygen {0}/base --scheme kwg --plain -o {0}/new", "there is no scheme 'kwg'; did you mean kgw?"),
        ("keygen {0}/base --scheme kgw --layers 3 --plain -o {0}/new", "--layers has no meaning with --scheme kgw"),
        ("keygen {0}/base --scheme kgw --set gamma --plain -o {0}/new", "--set expects NAME=VALUE, got 'gamma'"),
        ("keygen {0}/base --scheme kgw --set gamma=2 --plain -o {0}/new", "gamma is a share between 0 and 1"),
        ("keygen {0}/base --set gamma=2 --plain -o {0}/new", "--set goes with --scheme"),
        ("embed {0}/base --scheme kgw --key {0}/kgw.key -o {0}/new --steps 3", "--steps has no meaning"),
        ("embed {0}/base --scheme eaaw --key {0}/kgw.key -o {0}/new", "of the scheme kgw, expected eaaw"),
        ("embed {0}/base --key {0}/kgw.key -o {0}/new", "the key of another scheme, which --scheme names"),
        ("robustness {0}/base --scheme kgw --key {0}/kgw.key -o {0}/new", "kgw changes no weights"),
        ("robustness {0}/base --scheme kgw --key {0}/kgw.key -o {0}/new --trials 3", "--trials has no meaning"),
        ("verify {0}/base --scheme kgw", "--scheme needs the --key"),
        ("verify {0}/base --scheme kgw --key {0}/kgw.key --gamma 0.5", "--gamma has no meaning with --scheme kgw"),
        (
            "verify {0}/base --scheme kgw --key {0}/kgw.key --texts {0}/few.txt",
            "expected 6 texts of at least 16 tokens",
        ),
    ],
)
def test_what_does_not_belong_is_refused_in_one_line(place, line, said):
    (place / "few.txt").write_text("too short\n\nand too few")
    done = run(line.format(place))
    assert done.exit_code == 2 or done.exception is not None
    assert said in f"{done.output}{done.exception}"
    assert not (place / "new").exists()
