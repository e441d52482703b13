"""The process that reads a suspect: what it may not do, and that everything it says arrives."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from verify_helpers import PASSPHRASE, Told

from pathmark.cli.main import cli
from pathmark.errors import KeyFileError, UnforeseenError, VerificationError
from pathmark.front_door import sandbox
from pathmark.front_door.sandbox import Limits, run
from pathmark.keys import Registry
from pathmark.models import inspect_model
from pathmark.verification import Routes

QUICK = Limits(silence=30)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are safe on Linux alone")


def test_results_progress_and_refusals_arrive():
    told = Told()

    def job(say):
        say.stage("reading", 7)
        say.advance(3, "layer 1")
        return Routes({0: np.ones((1, 2, 3), dtype=np.float32)}, {}, np.ones((1, 2), dtype=bool))

    found = run(job, QUICK, told)
    assert (told.stages, told.done) == ([("reading", 7)], 3)
    assert found.probs[0].sum() == 6

    def refuse(_):
        raise KeyFileError("expected this, got that")

    with pytest.raises(KeyFileError, match="expected this, got that"):
        run(refuse, QUICK)


def test_a_crash_tells_kind_and_place_and_no_words():
    def job(_):
        raise ZeroDivisionError("the trigger is plum")

    with pytest.raises(UnforeseenError, match=r"ZeroDivisionError at test_sandbox\.py") as caught:
        run(job, QUICK)
    assert "plum" not in str(caught.value) + str(caught.value.frames)


def gone(child):
    """Whether a process has ended and been waited for."""
    try:
        os.kill(child, 0)
    except ProcessLookupError:
        return True
    return False


def test_silence_ends_it(tmp_path):
    def job(_):
        (tmp_path / "pid").write_text(str(os.getpid()))
        while True:
            pass

    started = time.monotonic()
    with pytest.raises(VerificationError, match="made no progress for 1 s and was ended"):
        run(job, Limits(silence=1))
    assert time.monotonic() - started < 10
    assert gone(int((tmp_path / "pid").read_text()))


def test_an_end_by_force_is_said():
    with pytest.raises(VerificationError, match="ended by signal 9"):
        run(lambda _: os.kill(os.getpid(), signal.SIGKILL), QUICK)


def test_memory_is_bounded():
    with pytest.raises(UnforeseenError, match="MemoryError"):
        run(lambda _: np.ones(1 << 28).sum(), Limits(silence=30, memory=1 << 28))
    assert run(lambda _: float(np.ones(1 << 20).sum()), Limits(silence=30, memory=1 << 28)) == 1 << 20


def test_the_network_and_other_programs_are_out_of_reach():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def connect(_):
            socket.create_connection(("127.0.0.1", port), timeout=5)

        with pytest.raises(UnforeseenError, match="PermissionError"):
            run(connect, QUICK)
        run(connect, Limits(silence=30, network=True))
    with pytest.raises(UnforeseenError, match="PermissionError"):
        run(lambda _: os.system("true"), QUICK)  # noqa: S605  that it is refused is the test


def test_without_the_hook_the_network_is_still_empty(monkeypatch):
    """The kernel's own namespace, which code outside Python cannot go around; not every kernel gives us one."""
    monkeypatch.setattr(sandbox, "_refuse", lambda event, arguments: None)
    interfaces = run(lambda _: sorted(Path("/proc/self/net/dev").read_text().split()), QUICK)
    if "eth0:" in interfaces or Path("/proc/self/net/dev").read_text().split() == interfaces:
        pytest.skip("this kernel gives no namespace to us; the hook is what holds")
    assert [word for word in interfaces if word.endswith(":")] == ["lo:"]


class _Evil:
    def __reduce__(self):
        return os.system, ("true",)


def test_a_child_cannot_make_its_parent_run_anything(monkeypatch):
    monkeypatch.setattr(sandbox, "_send", lambda pipe, kind, value: pipe.send_bytes(pickle.dumps(_Evil())))
    with pytest.raises(VerificationError, match="nothing was decided"):
        run(lambda _: 1, QUICK)
    for name in ("errors.PathmarkError", "front_door.sandbox.run", "cli.main.main"):
        module, _, attribute = f"pathmark.{name}".rpartition(".")
        with pytest.raises(VerificationError):
            sandbox._Plain(io.BytesIO()).find_class(module, attribute)


def test_interrupting_ends_the_child(tmp_path):
    def job(_):
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    def interrupt():
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            run(job, QUICK)
    finally:
        signal.signal(signal.SIGINT, before)
    assert gone(int((tmp_path / "pid").read_text()))


def test_commands_say_the_same_with_and_without(case, tmp_path, monkeypatch):
    monkeypatch.setenv("PATHMARK_PASSPHRASE", PASSPHRASE)
    Registry(tmp_path / "licensees.db").issue(case.key, "Ada Ltd")
    look = ("--key", case.key_file, "--n-texts", 6, "--json")
    book = ("--registry", tmp_path / "licensees.db", "--significance", "1e-3")
    readings = []
    for inside in (True, False):
        monkeypatch.setenv("PATHMARK_NO_SANDBOX", "" if inside else "1")
        ran = [
            CliRunner().invoke(cli, [str(word) for word in words])
            for words in (
                ("verify", case.marked, *look, "--reference", case.base),
                ("verify", case.base, *look),
                ("trace", case.marked, *look, *book),
                ("inspect", case.marked, "--json"),
            )
        ]
        said = [(one.exit_code, json.loads(one.stdout)) for one in ran]
        said[3] = (said[3][0], said[3][1]["layers"])  # the rest holds times and free memory
        readings.append(said)
    assert [code for code, _ in readings[0]] == [0, 1, 0, 0]
    assert readings[0] == readings[1]


def test_it_starts_at_once():
    inspect_model("bundled:tiny")  # imports
    started = time.monotonic()
    for _ in range(3):
        run(lambda _: inspect_model("bundled:tiny"), QUICK)
    inside = time.monotonic() - started
    started = time.monotonic()
    for _ in range(3):
        inspect_model("bundled:tiny")
    assert (inside - (time.monotonic() - started)) / 3 < 3  # seconds that the sandbox may cost
