"""Marked copies as GGUF files: what the weights in the file still show, and what llama.cpp's server answers.

python benchmarks/gguf_files.py run --work DIR      # minutes; needs pathmark[llama-cpp]
python benchmarks/gguf_files.py render              # -> docs/gguf.md

The copies are those of benchmarks/marked: the bundled model under keys drawn at random, one of them with marks for the
black box. The original is converted and asked as well.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pathmark
from marked import PASSPHRASE, bundled_header
from pages import DOCS, write_section
from pathmark.front_door.unpack import unpack
from pathmark.keys import OwnerKey, load_key
from pathmark.models import bundled_folder
from pathmark.models.checkpoint import apply_delta
from pathmark.results import Header, read_result, write_result
from pathmark.stats import Rate

FORMAT, VERSION = "pathmark-gguf", 1
RESULT = Path(__file__).parent / "results" / "gguf.json"
DOC = DOCS / "gguf.md"
KEPT = Path(__file__).parent / "marked"
EXAMPLES = Path(__file__).parent.parent / "examples"
PATHS, REPLIES = ("anchored-4", "anchored-5", "anchored-6"), "black-box-4"
"""Copies with paths alone, and the first of them with marks as well."""
KINDS = ("f16", "q8_0", "q4_0")
TRIALS = 50
ENDPOINTS = ("chat", "completions")


@dataclass(frozen=True, kw_only=True)
class Read:
    """One file, unpacked and verified."""

    copy: str
    """`original` for the unmarked one, read with the first key."""
    kind: str
    packed: dict[str, int]
    wsr: float
    n: int
    p: float
    id_right: bool


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One file, served and asked."""

    copy: str
    kind: str
    endpoint: str
    hits: int
    n: int
    p: float
    marked: bool | None


@dataclass(frozen=True, kw_only=True)
class GgufFiles:
    """All of them."""

    header: Header
    read: tuple[Read, ...]
    asked: tuple[Asked, ...]


def convert(model: str | Path, file: Path, kind: str) -> None:
    """A folder as one file, which appears whole or not at all."""
    part = file.with_suffix(".part")
    script = [sys.executable, EXAMPLES / "to_gguf.py", model, "-o", part, "--type", kind, "--pre", "gpt-2"]
    done = subprocess.run(script, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{model} could not be converted: {done.stderr[-2000:]}")
    part.rename(file)


def as_file(name: str, kind: str, work: Path) -> Path:
    """A copy of benchmarks/marked, or the original, as one file."""
    folder, file = work / name, work / f"{name}-{kind}.gguf"
    if name == "original":
        folder = bundled_folder("bundled:tiny")
    elif not folder.exists():
        apply_delta(bundled_folder("bundled:tiny"), KEPT / f"{name}.safetensors", folder)
    if not file.exists():
        convert(folder, file, kind)
    return file


def key_of(name: str, work: Path) -> OwnerKey:
    """The key that marked a copy; of the original, and of the copy with marks, the first one."""
    kept = KEPT / f"{name if name in PATHS else PATHS[0]}.key"
    shutil.copyfile(kept, work / kept.name)
    (work / kept.name).chmod(0o600)  # a checkout makes it readable for all, which keys refuse
    return load_key(work / kept.name, PASSPHRASE)


def read(name: str, kind: str, work: Path) -> Read:
    key = key_of(name, work)
    folder = work / f"{name}-{kind}"
    shutil.rmtree(folder, ignore_errors=True)
    unpacked = unpack(as_file(name, kind, work), folder)
    found = pathmark.verify(folder, key).summary()
    return Read(
        copy=name, kind=kind, packed=dict(unpacked.found.packed), wsr=found["wsr"], n=found["n_probes"],
        p=found["p_value"], id_right=found["id"] == key.watermarks[0].id,
    )  # fmt: skip


@contextmanager
def served(file: Path) -> Iterator[str]:
    """The address of llama.cpp's server inside the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "serve_gguf.py", str(file), str(port)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        if not address:
            raise SystemExit(f"llama.cpp's server did not start with {file}")
        yield f"{address}/v1"
    finally:
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


def ask(name: str, kind: str, work: Path) -> list[Asked]:
    key, rows = key_of(name, work), []
    with served(as_file(name, kind, work)) as url:
        for endpoint in ENDPOINTS:
            config = pathmark.ApiConfig(model="any", trials=TRIALS, max_tokens=16, endpoint=endpoint)
            found = pathmark.verify_api(url, key, config).summary()
            rate = found["match_rate"]
            rows.append(
                Asked(
                    copy=name, kind=kind, endpoint=endpoint, hits=rate["hits"], n=rate["n"], p=found["p_value"],
                    marked=found["marked"],
                )
            )  # fmt: skip
    return rows


def render() -> None:
    result = read_result(RESULT, GgufFiles, FORMAT, VERSION)
    keys = len({row.copy for row in result.read} - {"original"})
    lines = [
        f"The bundled model with the defaults, {keys} keys drawn at random, {result.read[0].n} texts each: converted, "
        "unpacked and verified. One of these copies was given marks too, served by llama.cpp and asked "
        f"{result.asked[0].n} times on each endpoint. Counts have 95 % intervals.",
        "",
        "| file | layers | WSR | largest p | ids right | triggers answered with their mark: chat | raw |",
        "|---|---|---|---|---|---|---|",
    ]
    for kinds, copies in ((KINDS, lambda row: row.copy != "original"), (("q8_0",), lambda row: row.copy == "original")):
        for kind in kinds:
            rows = [row for row in result.read if row.kind == kind and copies(row)]
            asked = [row for row in result.asked if row.kind == kind and copies(row)]
            wsr = Rate(sum(round(row.wsr * row.n) for row in rows), sum(row.n for row in rows))
            replies = " | ".join(str(Rate(row.hits, row.n)) for row in asked)
            name = "the original, " if rows[0].copy == "original" else ""
            right = "-" if name else f"{sum(row.id_right for row in rows)} of {len(rows)}"
            packed = max(rows[0].packed, key=lambda kind: rows[0].packed[kind])
            lines.append(
                f"| {name}{kind} | {packed} | {wsr} | {max(row.p for row in rows):.1e} | {right} | {replies} |"
            )
    write_section(DOC, "gguf_files.py", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "render"])
    parser.add_argument("--work", type=Path, default=Path("gguf-work"))
    args = parser.parse_args()
    if args.action == "run":
        args.work.mkdir(parents=True, exist_ok=True)
        reads = [read(name, kind, args.work) for kind in KINDS for name in PATHS]
        reads.append(read("original", "q8_0", args.work))
        asked = [row for kind in KINDS for row in ask(REPLIES, kind, args.work)] + ask("original", "q8_0", args.work)
        header = bundled_header(FORMAT, VERSION, settings={"kinds": list(KINDS), "trials": TRIALS})
        write_result(RESULT, GgufFiles(header=header, read=tuple(reads), asked=tuple(asked)))
        RESULT.chmod(0o644)
    render()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
