"""Suspects that were made to hurt: one clear line each, no verdict, no hang, no runaway memory.

All of them are read in one process that may use 1.5 GB more than it needs for an honest model, with an alarm for
each; see hostile_child.py.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import zoo
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
CHILD = Path(__file__).parent / "hostile_child.py"
READERS = ("inspect", "load", "stream")
SECONDS = 20
MARKER = "remote-code-was-run"


def config(**changes):
    """The config with other values."""

    def make(folder):
        path = folder / "config.json"
        said = json.loads(path.read_text())
        said.pop("layer_types", None)
        path.write_text(json.dumps(said | changes))

    return make


def config_text(text):
    return lambda folder: (folder / "config.json").write_bytes(text)


def sparse(name, size=1 << 30):
    """A file of a gigabyte that needs no disk."""

    def make(folder):
        with (folder / name).open("wb") as stream:
            stream.truncate(size)

    return make


def header(change):
    """The weights with their header changed and their bytes as they are."""

    def make(folder):
        data = (folder / WEIGHTS).read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        text = change(json.loads(data[8 : 8 + length]))
        text = text if isinstance(text, bytes) else json.dumps(text).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return make


def entry(**changes):
    """One tensor's header entry with other values."""

    def change(entries):
        entries["model.layers.0.mlp.gate.weight"] |= changes
        return entries

    return header(change)


def overlap(entries):
    one, other = entries["model.layers.0.mlp.gate.weight"], entries["model.layers.1.mlp.gate.weight"]
    one["data_offsets"] = other["data_offsets"]
    return entries


def twice(entries):
    text = json.dumps(entries)
    name = "model.layers.0.mlp.gate.weight"
    return f'{text[:-1]}, "{name}": {json.dumps(entries[name])}}}'.encode()


def crowd(entries):
    one = b'"data_offsets":[0,0],"shape":[0],"dtype":"F32"}'
    return b"{" + b",".join(b'"%d":{%s' % (n, one) for n in range(600_000)) + b"}"


def tensors(change):
    def make(folder):
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS, {"format": "pt"})

    return make


def fill(name, value):
    return tensors(lambda found: found[name].view(-1)[3:4].fill_(value))


def transposed(found):
    found["model.layers.0.mlp.gate.weight"] = found["model.layers.0.mlp.gate.weight"].T.contiguous()


def indexed(name, content=None):
    """Weights behind an index that says `name`."""

    def make(folder):
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
        index = {"weight_map": {"lm_head.weight": name}} if content is None else content
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))

    return make


def stored_twice(folder):
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00002.safetensors").write_bytes((folder / WEIGHTS).read_bytes())
    (folder / WEIGHTS).unlink()
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": names}))


def remote_code(model_type):
    def make(folder):
        for name in ("configuration_evil.py", "modeling_evil.py"):
            (folder / name).write_text(f"open({str(folder / MARKER)!r}, 'w').close()\n")
        names = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
        config(model_type=model_type, auto_map=names)(folder)

    return make


def pickle_only(folder):
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pickle-was-run'\ntR.")


def deep(levels):
    return b'{"model_type": "qwen2_moe", "x": ' + b"[" * levels + b"]" * levels + b"}"


BIG = 10**9
GATE, EXPERT = "model.layers.0.mlp.gate.weight", "model.layers.2.mlp.experts.1.down_proj.weight"
# name: (what is done to an honest folder, what the line must say, who must say it)
CASES = {
    "10^9 layers": (config(num_hidden_layers=BIG), "expected at most", READERS),
    "10^9 experts": (config(num_experts=BIG), "expected at most", READERS),
    "10^9 words": (config(vocab_size=BIG), "expected at most", READERS),
    "10^9 wide": (config(hidden_size=BIG), "expected at most", READERS),
    "10^9 heads": (config(num_attention_heads=BIG), "expected at most", READERS),
    "10^9 wide inside experts": (config(moe_intermediate_size=BIG), "expected at most", READERS),
    "10^9 layers as a float": (config(num_hidden_layers=1e9), "expected at most", READERS),
    "10^9 layers as text": (config(num_hidden_layers="1000000000"), "expected a natural number", READERS),
    "infinitely many layers": (config(num_hidden_layers=float("inf")), "expected at most", READERS),
    "wide as a list": (config(hidden_size=[32, 32]), "", READERS),
    "wide as an object": (config(hidden_size={"a": 1}), "expected a natural number", READERS),
    "wide as true": (config(hidden_size=True), "expected a natural number", READERS),
    "layers as half": (config(num_hidden_layers=2.5), "", READERS),
    "fewer than no experts": (config(num_experts=-1), "expected a natural number", READERS),
    "fewer than no words": (config(vocab_size=-128), "expected a natural number", READERS),
    "no heads": (config(num_attention_heads=0), "", READERS),
    "more chosen than there are": (config(num_experts_per_tok=4096), "", ("load", "stream")),
    "layers in a nested config": (config(text_config={"num_hidden_layers": BIG}), "text_config.num_hidden", READERS),
    "layers in a list of configs": (config(parts=[[{"num_layers": BIG}]]), "parts.num_layers", READERS),
    "a list too long": (config(layer_types=["full_attention"] * 200_000), "200,000 entries in layer_types", READERS),
    "layers times experts": (config(num_hidden_layers=2000, num_experts=60_000), "over all layers", READERS),
    "vocabulary times width": (config(vocab_size=9_999_999, hidden_size=9_999_984), "the weight files hold", READERS),
    "layers times width": (config(num_hidden_layers=1999, hidden_size=4096), "the weight files hold", READERS),
    "wider experts than stored": (config(moe_intermediate_size=9_999_999), "", READERS),
    "a trillion positions": (config(max_position_embeddings=10**15), "expected at most", READERS),
    "rope of nonsense": (config(rope_parameters={"rope_type": "yarn", "factor": "x"}), "", READERS),
    "weights elsewhere": (config(transformers_weights="../../x.safetensors"), "weight file of its own", READERS),
    "nested too deep": (config_text(deep(100_000)), "is not a JSON object", READERS),
    "nested deep": (config_text(deep(200)), "is not a JSON object", READERS),
    "brackets that hide depth": (config_text(b'{"a": "' + b"]" * 99_999 + b'", ' + deep(90_000)[1:]), "", READERS),
    "config of a gigabyte": (sparse("config.json"), "expected at most", READERS),
    "config that is no text": (config_text(b"\xff\xfe\x00\x01"), "is not a JSON object", READERS),
    "remote code of an unknown type": (remote_code("evil"), "trust", READERS),
    "remote code of a known type": (remote_code("qwen2_moe"), None, READERS),
    "unknown quantization": (config(quantization_config={"quant_method": "evil"}), "is quantized", ("stream",)),
    "quantization that is none": (config(quantization_config=[1]), "", ("load", "stream")),
    "pickle": (pickle_only, "which is a pickle and is never opened", READERS),
    "shape larger than its bytes": (entry(shape=[10**6, 32]), "its offsets give", READERS),
    "shape of 10^30": (entry(shape=[0, 10**30]), "no natural number", READERS),
    "shape that is negative": (entry(shape=[-8, -32]), "no natural number", READERS),
    "shape of text": (entry(shape="8x32"), "damaged safetensors header", READERS),
    "shape with fractions": (entry(shape=[8.0, 32.0]), "no natural number", READERS),
    "unknown dtype": (entry(dtype="F31"), "which the format does not know", READERS),
    "dtype that is a list": (entry(dtype=["F32"]), "damaged safetensors header", READERS),
    "offsets out of range": (entry(data_offsets=[2**40, 2**40 + 1024]), "truncated or padded", READERS),
    "offsets backwards": (entry(data_offsets=[1024, 0]), "its offsets give -1024", READERS),
    "offsets that overlap": (header(overlap), "damaged safetensors header", READERS),
    "a name twice": (header(twice), "stands there twice", READERS),
    "a header of 600,000 tensors": (header(crowd), "600,000 tensors; expected at most", READERS),
    "a header nested too deep": (header(lambda _: b'{"a":' * 100_000), "nested deeper", READERS),
    "a header of nothing": (sparse(WEIGHTS), "truncated or not safetensors", READERS),
    "transposed router": (tensors(transposed), "", ("load", "stream")),
    "index to /etc": (indexed("/etc/passwd"), "files of its own folder", READERS),
    "index upwards": (indexed("../../etc/passwd.safetensors"), "files of its own folder", READERS),
    "index to a pickle": (indexed("pytorch_model.bin"), "files of its own folder", READERS),
    "index of numbers": (indexed(7), "files of its own folder", READERS),
    "index of lists": (indexed(["a"]), "is damaged", READERS),
    "index without a map": (indexed("", [1, 2]), "is damaged", READERS),
    "tensors in two files": (stored_twice, "is stored twice", READERS),
    "NaN in a router": (fill(GATE, float("nan")), "holds NaN or inf", ("load", "stream")),
    "inf in an expert": (fill(EXPERT, float("inf")), "holds NaN or inf", ("load", "stream")),
    "NaN in the embedding": (fill("model.embed_tokens.weight", float("nan")), "NaN or inf", ("load", "stream")),
    "tokenizer of a gigabyte": (sparse("tokenizer.json"), "expected at most", ("tokenizer",)),
    "tokenizer that is broken": (
        lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"'),
        "no tokenizer",
        ("tokenizer",),
    ),
    "tokenizer nested too deep": (
        lambda folder: (folder / "tokenizer.json").write_bytes(b'{"model":' * 100_000),
        "no tokenizer",
        ("tokenizer",),
    ),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Every case through every reader, once."""
    root = tmp_path_factory.mktemp("hostile")
    zoo.tiny_model("qwen2_moe").save_pretrained(root / "honest")
    folders = {"honest": str(root / "honest")}
    for number, (name, (make, _, _)) in enumerate(CASES.items()):
        folder = root / f"case{number}" / "model"
        folder.mkdir(parents=True)
        for file in (root / "honest").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        make(folder)
        folders[name] = str(folder)
    (root / "cases.json").write_text(json.dumps(folders))
    done = subprocess.run(
        [sys.executable, str(CHILD), str(root / "cases.json")],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=root,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), folders


def test_the_honest_model_passes_every_reader_within_the_limits(outcomes):
    found = outcomes[0]["honest"]
    assert {reader: found[reader][0] for reader in READERS} == dict.fromkeys(READERS, "read")
    assert found["command"][0] == "exit 0"


@pytest.mark.parametrize("name", CASES)
def test_one_clear_line(name, outcomes):
    results, folders = outcomes
    _, words, readers = CASES[name]
    for reader, (kind, message, seconds) in results[name].items():
        # also those who need not notice must not crash, hang or eat memory
        assert kind in {"read", "refused", "exit 0", "exit 2"}, (reader, kind, message)
        assert "\n" not in message, (reader, message)
        assert len(message) < 700
        assert seconds < SECONDS
        if reader in readers and words is not None:
            assert kind == "refused", (reader, kind, message)
            assert words in message, (reader, message)
    if "inspect" in readers and words is not None:
        assert results[name]["command"][0] == "exit 2"
        assert results[name]["command"][1].startswith("pathmark: ")
    folder = Path(folders[name])
    assert not (folder / MARKER).exists()
    assert not (folder.parent.parent / "pickle-was-run").exists()
