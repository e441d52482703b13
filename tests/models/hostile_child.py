"""Runs hostile model folders through every reader, in a process with little memory and little time.

python hostile_child.py CASES.json: {name: folder} in, {name: {reader: [kind, message, seconds]}} out.
"""

from __future__ import annotations

import io
import json
import resource
import signal
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from pathmark.cli.main import main
from pathmark.errors import PathmarkError
from pathmark.models import inspect_model, load_model, load_tokenizer, record_routing, refuse_bad_weights, stream_model

SECONDS = 20
SPARE_BYTES = 1_500_000_000
IDS_BT = torch.arange(3, 27).reshape(2, 12)


def record(model):
    with torch.no_grad(), record_routing(model):
        model(input_ids=IDS_BT, use_cache=False)


def load(folder):
    model = load_model(folder)
    refuse_bad_weights(model)
    record(model)


def command(folder):
    """`pathmark inspect` through its entry point: exit code and what it says."""
    sys.argv = ["pathmark", "inspect", str(folder)]
    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            main()
    except SystemExit as end:
        return f"exit {end.code}", said.getvalue().rstrip("\n")
    return "no exit", said.getvalue()


def stream(folder):
    record(stream_model(folder))


READERS = {"inspect": inspect_model, "load": load, "stream": stream, "tokenizer": load_tokenizer}


def outcome(read, folder):
    started = time.monotonic()
    signal.alarm(SECONDS)
    try:
        kind, message = command(folder) if read is command else ("read", str(read(folder))[:100])
    except PathmarkError as error:
        kind, message = "refused", str(error)
    except BaseException as error:  # whatever else comes is the failure that is looked for
        kind, message = type(error).__name__, str(error)
    finally:
        signal.alarm(0)
    return [kind, message, time.monotonic() - started]


def too_long(*_):
    raise TimeoutError(f"more than {SECONDS} s")


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, too_long)
    load("bundled:tiny")  # everything that is imported late, before the limit is set
    inspect_model("bundled:tiny")
    load_tokenizer("bundled:tiny")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))
    cases = json.loads(Path(sys.argv[1]).read_text())
    readers = {**READERS, "command": command}
    print(json.dumps({name: {r: outcome(readers[r], f) for r in readers} for name, f in cases.items()}))
