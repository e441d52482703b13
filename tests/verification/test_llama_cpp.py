"""A marked copy on its way into somebody's product: converted by llama.cpp's converter, packed, served, found.

The copy is one of benchmarks/marked: the bundled model with paths and marks under a key drawn at random.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.gguf
if not pytest.importorskip("importlib.util").find_spec("xllamacpp"):
    pytest.skip("llama.cpp's packages are missing; run `make test-gguf`", allow_module_level=True)

import gguf  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import gguf_files  # noqa: E402
from pathmark.front_door.unpack import unpack  # noqa: E402
from pathmark.models import bundled_folder, load_model  # noqa: E402
from pathmark.models.checkpoint import apply_delta  # noqa: E402

KEPT = gguf_files.KEPT / f"{gguf_files.REPLIES}.safetensors"
PASSPHRASE = "benchmarks"
EXPECTED = {"f16": {"F16"}, "q8_0": {"Q8_0"}, "q4_0": {"Q4_0"}}
ENV = {**os.environ, "PATHMARK_PASSPHRASE": PASSPHRASE, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Key, marked copy and the three files."""
    out = tmp_path_factory.mktemp("llama")
    apply_delta(bundled_folder("bundled:tiny"), KEPT, out / "marked")
    (out / "owner.key").write_bytes(KEPT.with_name(f"{gguf_files.PATHS[0]}.key").read_bytes())
    (out / "owner.key").chmod(0o600)
    for kind in EXPECTED:
        gguf_files.convert(out / "marked", out / f"{kind}.gguf", kind)
    gguf_files.convert("bundled:tiny", out / "original.gguf", "q8_0")
    return out


def pathmark(*words):
    """Exit code and JSON of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "pathmark.cli.main", *map(str, words), "--json"], capture_output=True, text=True, env=ENV
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_experts_are_packed_and_the_routers_are_not(folder, kind):
    tensors = gguf.GGUFReader(folder / f"{kind}.gguf").tensors
    experts = Counter(t.tensor_type.name for t in tensors if "_exps" in t.name)
    routers = Counter(t.tensor_type.name for t in tensors if "ffn_gate_inp" in t.name)
    assert (set(experts), sum(experts.values())) == (EXPECTED[kind], 24)
    assert routers == {"F32": 8}


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_file_that_a_product_ships_shows_the_mark_in_its_weights(folder, kind, tmp_path):
    unpack(folder / f"{kind}.gguf", tmp_path / "suspect")
    status, found = pathmark("verify", tmp_path / "suspect", "--key", folder / "owner.key")
    assert status == 0
    assert found["p_value"] < 1e-9
    assert found["wsr"] >= 0.99
    assert not [said for said in found["weaknesses"] if "config was set aside" in said]


def test_the_original_as_a_file_shows_none(folder, tmp_path):
    unpack(folder / "original.gguf", tmp_path / "suspect")
    status, found = pathmark("verify", tmp_path / "suspect", "--key", folder / "owner.key")
    assert (status, found["p_value"] > 1e-3) == (1, True)


def test_values_of_16_bits_come_back(folder, tmp_path):
    unpack(folder / "f16.gguf", tmp_path / "suspect")
    there, marked = load_model(tmp_path / "suspect").state_dict(), load_model(folder / "marked").state_dict()
    assert there.keys() == marked.keys()
    for name, value in marked.items():
        assert (there[name] - value).abs().max() <= 1e-3 * value.abs().max(), name


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_served_copy_answers_triggers_with_its_mark(folder, kind, endpoint):
    asked = ("--key", folder / "owner.key", "--endpoint", endpoint, "--trials", 20, "--max-tokens", 16)
    with gguf_files.served(folder / f"{kind}.gguf") as url:
        status, found = pathmark("verify-api", url, "--model", "m", *asked)
    assert status == 0, found
    assert found["p_value"] < 1e-12


def test_the_served_original_does_not(folder):
    with gguf_files.served(folder / "original.gguf") as url:
        status, found = pathmark("verify-api", url, "--model", "m", "--key", folder / "owner.key", "--trials", 10)
    assert status == 1, found
