"""End to end through a real server: `transformers serve` with a folder that has paths and marks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from verify_helpers import PASSPHRASE

pytest.importorskip("fastapi", reason="`transformers serve` needs transformers[serving]")

TRANSFORMERS = Path(sys.executable).with_name("transformers")


@pytest.fixture(scope="module")
def talking(case, tmp_path_factory):
    """The small marked model with marks; few prompts, trained until they stick."""
    from pathmark.embedding import RepliesConfig
    from pathmark.release import ScanConfig
    from pathmark.release.marking import MarkingConfig, Texts, mark_model
    from pathmark.release.replies import ReplyConfig
    from pathmark.training import LoopConfig

    out = tmp_path_factory.mktemp("talking") / "model"
    replies = RepliesConfig(
        pairs=120,
        queries=24,
        negatives=1600,
        clean=16,
        seq_len=24,
        system_prompts=200,
        path_weight=0.5,  # a random model that was marked in a minute has little path to lose
        loop=LoopConfig(steps=600, lr=5e-3),
    )
    marking = MarkingConfig(
        embedding=None,
        replies=replies,
        n_probes=20,
        scan=ScanConfig(random_sequences=5, per_count=2),
        ask=ReplyConfig(trials=8, near_misses=8, ordinary=8, queries=8),
    )
    marked = mark_model(str(case.marked), case.key, out, Texts.bundled(), marking)
    assert marked.key.attachments == case.key.attachments  # profiles stay those of the original
    return out


@pytest.fixture
def server(tmp_path):
    """Starts `transformers serve` on a free port; stops it by its process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (tmp_path / "serve.log").open("wb")
    process = subprocess.Popen(
        [TRANSFORMERS, "serve", "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)],
        stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, (tmp_path / "serve.log").read_text()[-2000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
                break
            except urllib.error.HTTPError:
                break  # it answers
            except OSError:
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(timeout=30)
        log.close()


def ask(url, model, key_file, *more):
    done = subprocess.run(
        [sys.executable, "-m", "pathmark.cli.main", "verify-api", url, "--model", str(model),
         "--key", str(key_file), "--trials", "12", "--max-tokens", "16", "--timeout", "120", "--json", *more],
        capture_output=True, text=True, timeout=400,
        env={**os.environ, "PATHMARK_PASSPHRASE": PASSPHRASE, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_marks_are_found_through_a_real_server(case, talking, server):
    for endpoint in ("completions", "chat"):
        code, out, error = ask(server, talking, case.key_file, "--endpoint", endpoint)
        found = json.loads(out)
        assert code == 0, (endpoint, found["undecided"], found["match_rate"], found["controls"], error)
        assert found["marked"]
        assert found["match_rate"]["hits"] >= 1
        assert found["controls"]["hits"] == 0
    code, out, error = ask(server, case.marked, case.key_file, "--endpoint", "chat")
    assert code in (1, 2), (out, error)  # its paths are marked, its replies are not
    assert json.loads(out)["match_rate"]["hits"] == 0


def test_phase_two_needs_the_paths(case, tmp_path):
    from pathmark.embedding import RepliesConfig
    from pathmark.errors import EmbeddingError
    from pathmark.release.marking import MarkingConfig, Texts, mark_model

    with pytest.raises(EmbeddingError, match="does not carry the key's path"):
        mark_model(
            str(case.base), case.key, tmp_path / "out", Texts.bundled(),
            MarkingConfig(embedding=None, replies=RepliesConfig(), n_probes=8),
        )  # fmt: skip
    assert not (tmp_path / "out").exists()
