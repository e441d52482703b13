from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pathmark.cli.barcode import command
from pathmark.errors import CapacityError, KeyFileError, VerificationError
from pathmark.keys import OwnerKey, WatermarkRequest, create_key, save_key

FIXTURES = Path(__file__).parents[1] / "keys" / "key_fixtures.py"
PASSPHRASE = "correct horse battery staple"


@pytest.fixture(scope="module")
def key() -> OwnerKey:
    spec = importlib.util.spec_from_file_location("barcode_key_fixtures", FIXTURES)
    assert spec is not None
    assert spec.loader is not None
    fixtures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fixtures)
    requests = [
        WatermarkRequest(plans=fixtures.plans(range(18, 24)), id=123_456_789),
        WatermarkRequest(plans=fixtures.plans(range(12, 18)), id=5),
    ]
    made, _ = create_key(fixtures.paper_model(), requests, fixtures.CODEC, secret=bytes(range(32)))
    return made


@pytest.fixture
def key_file(key: OwnerKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATHMARK_PASSPHRASE", PASSPHRASE)
    file = tmp_path / "owner.key"
    save_key(key, file, PASSPHRASE, scrypt_n=2**10)
    return file


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if isinstance(result.exception, Exception):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("suffix", ["svg", "png"])
@pytest.mark.parametrize("number", [0, 1])
def test_draw_and_read_back(key: OwnerKey, key_file: Path, tmp_path: Path, suffix: str, number: int) -> None:
    picture = tmp_path / f"mark.{suffix}"
    path = key.watermarks[number].group_indices
    words = " ".join(map(str, path))
    drawn = run(key_file, "-o", picture, "--watermark", number)
    assert f"path {words}" in drawn
    assert "The key has 2 watermarks" in drawn
    assert run("--read", picture) == f"path {words}\n"
    assert f"watermark {number} of this key" in run("--read", picture, "--key", key_file)
    assert json.loads(run("--read", picture, "--key", key_file, "--json")) == {
        "path": list(path),
        "watermarks": [number],
    }


def test_a_foreign_path_exits_1(key: OwnerKey, key_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.key"
    save_key(key.with_id(7), other, PASSPHRASE, scrypt_n=2**10)
    printed = json.loads(run(other, "-o", tmp_path / "mark.png", "--json"))
    assert printed["layers"] == list(range(18, 24))
    assert "none of this key's" in run("--read", tmp_path / "mark.png", "--key", key_file, code=1)


def test_errors_are_the_users_kind(
    key: OwnerKey, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CapacityError, match="watermark below 2, got 2"):
        run(key_file, "-o", tmp_path / "mark.svg", "--watermark", 2)
    with pytest.raises(VerificationError, match="cannot read"):
        run("--read", tmp_path / "missing.png")
    for arguments in ([], [key_file], ["--read", "a.png", "-o", "b.png"], [key_file, "--read", "a.png"]):
        assert "give either KEY" in run(*arguments, code=2)
    monkeypatch.delenv("PATHMARK_PASSPHRASE")
    with pytest.raises(KeyFileError, match="PATHMARK_PASSPHRASE"):
        run(key_file, "-o", tmp_path / "mark.svg")
