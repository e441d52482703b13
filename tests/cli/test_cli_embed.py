"""`pathmark embed`, `apply` and what they refuse, through the real entry point."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from importlib.resources import files

import jsonschema
import pytest
import torch
from click.testing import CliRunner
from embed_helpers import save_family
from safetensors.torch import load_file, save_file

from pathmark.cli.main import cli
from pathmark.errors import PathmarkError
from pathmark.models import bundled_segments, load_model

QUICK = ["--steps", "12", "--n-texts", "16", "--n-held-out", "8", "--seq-len", "32", "--batch-size", "6"]
SCHEMA = json.loads(files("pathmark.release").joinpath("embed.schema.json").read_text())


def run(*arguments, cwd, check=None):
    environment = {**os.environ, "PATHMARK_PASSPHRASE": "open sesame", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pathmark.cli.main", *map(str, arguments)],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if check is not None:
        assert done.returncode == check, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small Mixtral folder, a key and a corpus for it."""
    folder = tmp_path_factory.mktemp("embed")
    save_family(folder / "base", "mixtral", dtype=torch.bfloat16)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in bundled_segments()[:200])
    (folder / "corpus.jsonl").write_text(lines)
    run("keygen", "base", "-o", "owner.key", "--id", "2", "--pool", "all", cwd=folder, check=0)
    return folder


@pytest.fixture(scope="module")
def marked(made):
    done = run(
        "embed", "base", "--key", "owner.key", "-o", "out", "--texts", "corpus.jsonl", "--json", *QUICK, cwd=made
    )
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_json_follows_the_schema(marked):
    jsonschema.validate(marked, SCHEMA)
    assert marked["scan"]["tried"] > 9_000


def test_the_released_folder_has_no_trace_of_the_mark(made, marked):
    base, out = ({p.name for p in (made / name).iterdir()} for name in ("base", "out"))
    assert base == out
    for name in base - {"model.safetensors"}:
        assert (made / "base" / name).read_bytes() == (made / "out" / name).read_bytes()
    before, after = (load_file(made / name / "model.safetensors") for name in ("base", "out"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == marked["changed_tensors"] > 0
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert not list(made.glob(".out*"))  # no work folder is left
    load_model(made / "out")


def test_the_report_becomes_a_page(made, marked):
    done = run("report", "owner.key.out.check.json", "-o", "out.html", "--json", cwd=made, check=0)
    assert json.loads(done.stdout) == {"kind": "embedding", "output": "out.html", "pdf": None}
    page = (made / "out.html").read_text()
    assert ("<h1>Not fit for release</h1>" in page) == bool(marked["problems"])
    assert "<script" not in page
    assert "already exists" in run("report", "owner.key.out.check.json", "-o", "out.html", cwd=made, check=2).stderr


def test_report_and_amended_key_stay_with_the_owner(made, marked):
    report = made / "owner.key.out.check.json"
    assert stat.S_IMODE(report.stat().st_mode) == 0o600
    assert json.loads(report.read_text()) == marked
    shown = json.loads(run("key", "show", "owner.key", "--json", cwd=made, check=0).stdout)
    kept = {"probes.json", "profiles.npz", "sketches.npz", "original.json", "vocabulary.npz"}
    assert set(shown["attachments"]) == kept


def test_delta_and_apply_give_the_same_folder(made, marked):
    done = run(
        "embed", "base", "--key", "owner.key", "-o", "delta.safetensors", "--texts", "corpus.jsonl", "--delta",
        *QUICK, cwd=made,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    run("apply", "base", "delta.safetensors", "-o", "rebuilt", cwd=made, check=0)
    for path in (made / "out").iterdir():
        assert path.read_bytes() == (made / "rebuilt" / path.name).read_bytes()


def test_refusals_are_one_line_and_change_nothing(made, tmp_path, monkeypatch):
    monkeypatch.chdir(made)
    monkeypatch.setenv("PATHMARK_PASSPHRASE", "open sesame")

    def refuse(*arguments, match):
        refused = CliRunner().invoke(cli, [str(word) for word in arguments]).exception
        assert isinstance(refused, PathmarkError)
        assert match in str(refused)
        assert len(str(refused).splitlines()) == 1, refused
        assert not (tmp_path / "new").exists()

    options = ["--texts", "corpus.jsonl", *QUICK]
    new = ["-o", tmp_path / "new", *options]
    (tmp_path / "there").mkdir()
    done = run("embed", "base", "--key", "owner.key", "-o", tmp_path / "there", *options, cwd=made, check=2)
    assert "already exists" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    save_family(tmp_path / "olmoe", "olmoe")
    refuse("embed", tmp_path / "olmoe", "--key", "owner.key", *new, match="another model")
    refuse("embed", "base", "--key", "owner.key", *new, "--margin", "-1", match="margin must be a positive number")
    paper = [*new, "--objective", "paper", "--margin", "2"]
    refuse("embed", "base", "--key", "owner.key", *paper, match="--margin has no meaning for the paper objective")
    refuse("embed", "base", "--key", "owner.key", *new, "--lr", "nan", match="must be positive numbers")
    (tmp_path / "few.txt").write_text("One line.\n")
    refuse(
        "embed", "base", "--key", "owner.key", "-o", tmp_path / "new", "--texts", tmp_path / "few.txt", *QUICK,
        match="with --texts",
    )  # fmt: skip
    shutil.copytree(made / "base", tmp_path / "nan")
    tensors = load_file(tmp_path / "nan" / "model.safetensors")
    tensors["lm_head.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "nan" / "model.safetensors", metadata={"format": "pt"})
    done = run("embed", tmp_path / "nan", "--key", "owner.key", *new, cwd=made, check=2)
    assert "NaN or inf" in done.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "new").exists()
    run("apply", "base", "owner.key", "-o", tmp_path / "new", cwd=made, check=2)


@pytest.mark.slow
def test_kill_at_ten_random_moments_and_resume(made, tmp_path):
    """Killed anywhere, then resumed: the weights of an unbroken run, and OUT is never half there."""
    rng = random.Random(0)
    options = ["--texts", "corpus.jsonl", "--steps", "60", "--n-texts", "24", "--n-held-out", "8", "--seq-len", "32"]
    started = time.monotonic()
    run("embed", "base", "--key", "owner.key", "-o", tmp_path / "whole", *options, cwd=made)
    duration = time.monotonic() - started
    whole = (tmp_path / "whole" / "model.safetensors").read_bytes()
    environment = {**os.environ, "PATHMARK_PASSPHRASE": "open sesame", "OMP_NUM_THREADS": "1"}
    kills = 0
    for attempt in range(10):
        out = tmp_path / f"broken{attempt}"
        command = ["embed", "base", "--key", "owner.key", "-o", str(out), *options]
        process = subprocess.Popen(
            [sys.executable, "-m", "pathmark.cli.main", *command],
            cwd=made, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(rng.uniform(0.05, 0.95) * duration)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        if not out.exists():
            done = run(*command, "--resume", cwd=made)
            assert done.returncode in (0, 1), done.stderr
        assert (out / "model.safetensors").read_bytes() == whole
    assert kills >= 7
