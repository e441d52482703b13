"""How every command ends when something goes wrong: one line, and never the exit code that acquits."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import pytest

from pathmark.cli import main
from pathmark.errors import KeyFileError, UnforeseenError


@pytest.fixture
def failing(monkeypatch):
    """Runs `pathmark fail` with a command that raises; returns the exit code."""

    def run(error, *words):
        @click.command()
        @click.option("--number", type=int)
        def command(number):
            raise error

        monkeypatch.setattr(main.LazyGroup, "get_command", lambda *_: command)
        monkeypatch.setattr("sys.argv", ["pathmark", "fail", *words])
        with pytest.raises(SystemExit) as end:
            main.main()
        return end.value.code

    return run


def test_what_nobody_foresaw_is_no_acquittal_and_tells_no_secret(failing, capsys):
    assert failing(RuntimeError("the trigger is horse battery staple")) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "RuntimeError" in error
    assert "nothing was decided" in error
    assert "horse" not in error


def test_a_foreseen_error_says_what_to_try(failing, capsys):
    assert failing(KeyFileError("expected a key,\ngot a picture")) == 2
    assert capsys.readouterr().err == "pathmark: expected a key, got a picture\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_an_interrupted_run_is_no_acquittal(failing, capsys, error):
    assert failing(error) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(("processes", "rank", "told"), [("1", "0", False), ("2", "0", True), ("2", "1", False)])
def test_the_first_of_several_processes_says_that_torchrun_s_status_is_no_verdict(
    failing, capsys, monkeypatch, processes, rank, told
):
    monkeypatch.setenv("WORLD_SIZE", processes)
    monkeypatch.setenv("RANK", rank)
    assert failing(KeyFileError("no key")) == 2
    assert ("its status is no verdict" in capsys.readouterr().err) is told


def test_wrong_words_end_with_2(failing, capsys):
    assert failing(None, "--number", "many") == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert error.startswith("pathmark: ")
    assert "not a valid integer" in error
    assert error.endswith("Try: pathmark fail --help\n")
    assert failing(click.FileError("gone.key", "not there")) == 2


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["verfy"], "verify"), (["keygenn"], "keygen"), (["attack", "quantise"], None), (["key", "shw"], "show")],
)
def test_a_command_that_does_not_exist_is_guessed(monkeypatch, capsys, words, meant):
    monkeypatch.setattr("sys.argv", ["pathmark", *words])
    with pytest.raises(SystemExit) as end:
        main.main()
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.startswith(f"pathmark: there is no command {words[-1]!r}")
    assert len(error.splitlines()) == 1
    assert (f"did you mean {meant}" in error) if meant else ("did you mean" not in error)


def test_no_words_at_all_show_the_commands(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["pathmark"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert all(f"  {name} " in error for name in main.COMMANDS)


def test_a_crash_file_is_written_on_request_and_tells_no_secret(failing, capsys, monkeypatch, tmp_path):
    path = tmp_path / "crash.json"
    monkeypatch.setenv("PATHMARK_CRASH_FILE", str(path))
    assert failing(KeyFileError("expected a key, got a picture")) == 2
    assert not path.exists()  # that was foreseen
    assert failing(RuntimeError("horse")) == 2
    said = json.loads(path.read_text())
    assert said["kind"] == "RuntimeError"
    assert said["frames"][-1].startswith("test_cli_main.py:")
    assert "horse" not in path.read_text()
    path.unlink()
    assert failing(UnforeseenError("IndexError", ("there.py:3 f",))) == 2
    assert json.loads(path.read_text())["frames"] == ["there.py:3 f"]
    assert failing(RuntimeError("horse")) == 2  # which must not hide what went wrong first
    assert "no crash file" in capsys.readouterr().err


def test_debugging_shows_everything(failing, monkeypatch):
    monkeypatch.setenv("PATHMARK_DEBUG", "1")
    with pytest.raises(RuntimeError, match="horse"):
        failing(RuntimeError("horse"))


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
def test_under_torchrun_only_what_joins_runs(monkeypatch, capsys, name):
    @click.command()
    def command():
        raise KeyFileError("it ran")

    monkeypatch.setattr(main.LazyGroup, "get_command", lambda *_: command)
    monkeypatch.setattr("sys.argv", ["pathmark", name])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    joins = name in ("embed", "verify", "trace", "attack")
    assert ("it ran" in said) == joins
    assert (f"pathmark {name} is for one process, got 2 from torchrun" in said) == (not joins)


def test_a_reader_who_goes_away_is_no_acquittal():
    """As `pathmark verify ... | head -1` does; click would end with 1."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", "from pathmark.cli.main import main; main()", "reproduce", "list"]
    with os.fdopen(write, "w") as nobody:
        done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "pathmark: nobody read the output to its end; this exit code decides nothing"
