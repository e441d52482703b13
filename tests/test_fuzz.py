"""Every reader of foreign bytes, on damaged, cut, doubled and senseless input.

A reader may take what it is given or refuse it with an error of ours. It may not raise anything else, take longer than
two seconds, or keep memory. `make test` tries 500 inputs of each format, `make test-slow` 20,000.
"""

from __future__ import annotations

import copy
import gc
import json
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
from evidence_helpers import paper_bundle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from key_fixtures import golden_key
from safetensors.numpy import save

from pathmark.errors import PathmarkError
from pathmark.front_door.custody import read_custody
from pathmark.keys import Registry, check_claim, commit_key, reveal_watermark
from pathmark.keys.claim import RevealedClaim
from pathmark.keys.commitment import load_commitment, load_public
from pathmark.keys.keyfile import no_passphrase, seal, unseal
from pathmark.keys.ledger import Ledger
from pathmark.keys.opentimestamps import MAGIC
from pathmark.keys.receipts import Receipt, load_receipt
from pathmark.keys.replyrule import read_reply
from pathmark.keys.timestamps import stamp
from pathmark.models.gguf import _header
from pathmark.models.headers import read_header
from pathmark.models.suspects import _adapter_config
from pathmark.results import read_robustness
from pathmark.results.bundlefile import zip_bytes
from pathmark.results.evidence import EvidenceBundle
from pathmark.results.evidence_check import check_bundle
from pathmark.verification.blackbox.answers import OddAnswerError, parse_reply
from pathmark.verification.blackbox.exchangelog import ExchangeLog
from pathmark.verification.recorded.enginefile import read_routes
from pathmark.verification.recorded.routefile import RecordedProbe, Recording, RouteHeader, write_routes

OURS = (PathmarkError, OddAnswerError)
NASTY: list[Any] = [
    None, True, -1, 0, 2**63, 2**200, 1e308, -0.5, "", "0" * 64, "\x00", "é" * 40, [], {}, [[[[]]]], [1] * 300,
    {"version": 10**9}, {"": {}}, "9999-12-31T23:59:59+00:00", "../../../etc/passwd",
]  # fmt: skip
"""Put in the place of some value of a JSON document."""


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes that once were a sound file, or never were."""
    way = draw(st.sampled_from(["edit", "edit", "json", "json", "cut", "noise"]))
    if way == "noise":
        return draw(st.binary(max_size=400))
    if way == "cut":
        return whole[: draw(st.integers(0, len(whole)))]
    if way == "json":
        with suppress(ValueError):
            return _spoilt(whole, draw)
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([0, 1, 1, 1, 8, 100]))
        data[place : place + length] = draw(st.binary(max_size=12))
    return bytes(data)


def _spoilt(whole: bytes, draw: st.DrawFn) -> bytes:
    """A JSON document, or some line of a file of them, with values exchanged or left out."""
    lines = whole.splitlines() if b"\n{" in whole.strip() else [whole]
    number = draw(st.integers(0, len(lines) - 1))
    document = json.loads(lines[number])
    if not isinstance(document, dict | list):
        raise ValueError("some bytes that happen to be a number")
    for _ in range(draw(st.integers(1, 3))):
        at: Any = document
        for _ in range(draw(st.integers(0, 4))):
            inner = [v for v in (at.values() if isinstance(at, dict) else at) if isinstance(v, dict | list) and v]
            if not inner:
                break
            at = inner[draw(st.integers(0, len(inner) - 1))]
        if not at:
            break
        place = draw(st.sampled_from(sorted(at))) if isinstance(at, dict) else draw(st.integers(0, len(at) - 1))
        if draw(st.booleans()):
            at[place] = copy.deepcopy(draw(st.sampled_from(NASTY)))
        else:
            del at[place]
    lines[number] = json.dumps(document).encode()
    return b"\n".join(lines) + b"\n" * (len(lines) > 1)


KEY = golden_key()
COMMITMENT = commit_key(KEY)
CLAIM = reveal_watermark(KEY, 0)


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o600)  # files that others may read are refused before their content is looked at


def key(data: bytes, path: Path) -> None:
    unseal(data, no_passphrase if b'"cipher":"none"' in data else "open sesame")


def commitment(data: bytes, path: Path) -> None:
    put(path, data)
    load_commitment(path)


def claim(data: bytes, path: Path) -> None:
    put(path, data)
    found = check_claim(load_public(path, "claim"), COMMITMENT)
    assert isinstance(found, RevealedClaim)


def registry(data: bytes, path: Path) -> None:
    put(path, data)
    Registry(path).check_key(KEY)
    Registry(path).entries()


def ledger(data: bytes, path: Path) -> None:
    put(path, data)
    Ledger(path).uses()


def routes(data: bytes, path: Path) -> None:
    put(path, data)
    read_routes(path, KEY.model)


def header(data: bytes, path: Path) -> None:
    put(path, data)
    read_header(path)


def gguf_header(data: bytes, path: Path) -> None:
    put(path, data)
    _header(path)


def adapter(data: bytes, path: Path) -> None:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_bytes(data)
    _adapter_config(path)


def reply(data: bytes, path: Path) -> None:
    answer = parse_reply("chat", data)
    marks = {(0, 0): KEY.watermarks[0].triggers[0].mark}
    read_reply(answer.text, "prompt", marks, 16)


def timestamp(data: bytes, path: Path) -> None:
    stamp(COMMITMENT, data)


def receipt(data: bytes, path: Path) -> None:
    put(path, data)
    load_receipt(path)


def exchanges(data: bytes, path: Path) -> None:
    put(path, data)
    with ExchangeLog(path) as log:
        log.begin({"plan": "x"})


def results(data: bytes, path: Path) -> None:
    put(path, data)
    read_robustness(path)


def bundle(data: bytes, path: Path) -> None:
    put(path, data)
    check_bundle(EvidenceBundle.load(path))


def part(name: str) -> Callable[[bytes, Path], None]:
    """A part of a bundle that its owner signed although it is damaged: the check reads on."""

    def read(data: bytes, path: Path) -> None:
        check_bundle(EvidenceBundle(paper_bundle(**{name: data})))

    return read


def custody(data: bytes, path: Path) -> None:
    put(path, data)
    read_custody(path)


def _sqlite(make: Callable[[Path], object], folder: Path) -> bytes:
    path = folder / "made.db"
    make(path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("VACUUM")
    db.close()
    return path.read_bytes()


def _recorded(folder: Path, suffix: str) -> bytes:
    layer = KEY.model.routed[0]
    header = RouteHeader(layers=(layer.layer,), n_experts=layer.experts, top_k=layer.top_k)
    experts_TLK = np.tile(np.arange(layer.top_k, dtype=np.int32), (3, 1, 1))
    probe = RecordedProbe(probe="a", tokens=(1, 2, 3), experts_TLK=experts_TLK)
    path = folder / f"made{suffix}"
    write_routes(path, Recording(header, (probe,)))
    return path.read_bytes()


def _gguf(folder: Path) -> bytes:
    writer = gguf.GGUFWriter(folder / "made.gguf", "qwen3moe")
    writer.add_expert_feed_forward_length(4)
    writer.add_token_list(["a", "b"])
    for name in ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (folder / "made.gguf").read_bytes()


def sound(name: str, folder: Path) -> tuple[Callable[[bytes, Path], None], str, bytes]:
    """(reader, suffix of its files, a sound file)."""
    if name == "registry":
        return registry, ".db", _sqlite(lambda path: Registry(path).issue(KEY, "Alpha Ltd"), folder)
    if name == "ledger":
        return ledger, ".db", _sqlite(lambda path: Ledger(path).take(KEY, 1, host="h", model="m"), folder)
    if name == "receipt":
        book = Registry(folder / "book.db")
        book.issue(KEY, "Alpha Ltd")
        signed = Receipt(*book.row("Alpha Ltd")).countersigned_by(KEY.signing_key)
        return receipt, ".json", json.dumps(signed.document()).encode()
    if name == "block proof":
        digest = sha256(COMMITMENT.statement).digest()
        block = bytes.fromhex("000588960d73d719010107")
        return timestamp, "", MAGIC + b"\x01\x08" + digest + b"\xf0\x04salt\x08\xff" + block + b"\xf1\x02ab\x08" + block
    if name == "gguf":
        return gguf_header, ".gguf", _gguf(folder)
    if name == "safetensors":
        return header, ".safetensors", save({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float16)})
    if name in ("routes.jsonl", "routes.npz"):
        return routes, name.removeprefix("routes"), _recorded(folder, name.removeprefix("routes"))
    if name == "exchange log":
        path = folder / "made.jsonl"
        with ExchangeLog(path) as log:
            log.begin({"plan": "x"})
        return exchanges, ".jsonl", path.read_bytes()
    if name.startswith("evidence/"):
        inside = name.removeprefix("evidence/")
        return part(inside), "", paper_bundle()[inside]
    message = {"choices": [{"message": {"role": "assistant", "content": "some words"}, "finish_reason": "stop"}]}
    lora = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}
    engine = {"choices": [{"routed_experts": [[[0, 1]]], "prompt_token_ids": [1]}], "id": "a"}
    whole: dict[str, tuple[Callable[[bytes, Path], None], str, bytes]] = {
        "key": (key, "", seal(KEY, None, plain=True)),
        "encrypted key": (key, "", seal(KEY, "open sesame", scrypt_n=2**14)),
        "commitment": (commitment, ".json", json.dumps(COMMITMENT.document()).encode()),
        "claim": (claim, ".json", json.dumps(CLAIM).encode()),
        "engine's routes": (routes, ".jsonl", (json.dumps(engine) + "\n").encode()),
        "adapter": (adapter, "", json.dumps(lora).encode()),
        "reply": (reply, "", json.dumps(message).encode()),
        "timestamp": (timestamp, "", bytes.fromhex("3003020100")),
        "evidence.zip": (bundle, ".zip", zip_bytes(paper_bundle())),
        "custody": (custody, ".toml", b'[[step]]\nwho = "a"\nwhen = "b"\nhow = "c"\n'),
        "result": (results, ".json", json.dumps({"header": {"format": "pathmark-robustness", "version": 3}}).encode()),
    }
    return whole[name]


FORMATS = (
    "key", "encrypted key", "commitment", "claim", "registry", "ledger", "routes.jsonl", "routes.npz",
    "engine's routes", "safetensors", "gguf", "adapter", "reply", "timestamp", "block proof", "receipt",
    "exchange log", "result",
    "evidence.zip", "evidence/measured.json", "evidence/transcript.jsonl", "custody",
)  # fmt: skip


def fuzz(name: str, folder: Path, cases: int) -> None:
    reader, suffix, whole = sound(name, folder)
    place = folder / f"case{suffix}"
    kept: list[bytes] = []

    def read(data: bytes) -> None:
        with suppress(*OURS):
            reader(data, place)

    @settings(
        max_examples=cases, deadline=2000, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(damaged(whole))
    def check(data: bytes) -> None:
        read(data)
        kept.append(data)

    check()
    assert len(kept) >= cases // 2
    # hypothesis remembers what it tried, so a reader's own memory is watched without it
    again = kept[:: max(1, len(kept) // 200)]
    for data in again:
        read(data)
    gc.collect()
    early = psutil.Process().memory_info().rss
    for _ in range(cases // 250):
        for data in again:
            read(data)
    gc.collect()
    assert psutil.Process().memory_info().rss - early < 20e6


@pytest.mark.parametrize("name", FORMATS)
def test_readers_refuse_in_our_own_words(name, tmp_path):
    fuzz(name, tmp_path, 500)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_readers_refuse_in_our_own_words_at_length(name, tmp_path):
    fuzz(name, tmp_path, 20_000)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("timestamp", "result", "engine's routes")])
def test_what_is_damaged_here_was_sound(name, tmp_path):
    reader, suffix, whole = sound(name, tmp_path)
    reader(whole, tmp_path / f"sound{suffix}")
