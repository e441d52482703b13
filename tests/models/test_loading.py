"""From a name to a model: what is refused, with which words, and what loads unchanged."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file

from pathmark.errors import ModelError
from pathmark.models import (
    bundled_folder,
    check_safetensors,
    find_routers,
    inspect_model,
    load_config,
    load_model,
    load_tokenizer,
    resolve_model,
)

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    zoo.tiny_model("qwen2_moe").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("layer_types", None)
    path.write_text(json.dumps(config | changes))


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


def test_a_sound_folder_loads_in_float32_or_in_its_own_type(folder):
    reference = zoo.tiny_model("qwen2_moe").state_dict()
    model = load_model(folder)
    assert not model.training
    assert all(torch.equal(tensor, reference[name]) for name, tensor in model.state_dict().items())
    zoo.tiny_model("qwen2_moe").bfloat16().save_pretrained(folder)
    assert load_model(folder).dtype == torch.float32
    assert load_model(folder, dtype=None).dtype == torch.bfloat16


@pytest.mark.parametrize("model_type", [t for t in zoo.moe_types() if t != "doge"])
def test_inspect_and_load_agree_for_every_family(model_type, tmp_path):
    model = zoo.tiny_model(model_type)
    model.save_pretrained(tmp_path)
    report = inspect_model(tmp_path)
    assert report.weights == "ok"
    assert report.architecture == type(model).__name__
    assert report.parameters == sum(p.numel() for p in model.parameters())
    expected = [(s.layer, s.n_experts, s.top_k, s.kind) for s in find_routers(load_model(tmp_path))]
    assert [(f.layer, f.experts, f.top_k, f.kind) for f in report.routed] == expected


def test_truncated_at_many_points(folder):
    whole = (folder / WEIGHTS).read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for size in (0, 4, 8, 9, header // 2, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:size])
        for read in (inspect_model, load_model, check_safetensors):
            with pytest.raises(ModelError, match="truncated") as error:
                read(folder)
            assert WEIGHTS in one_line(error)


def test_padded_file(folder):
    with (folder / WEIGHTS).open("ab") as stream:
        stream.write(b"\0" * 64)
    with pytest.raises(ModelError, match=r"truncated or padded: expected [0-9]+ bytes, got [0-9]+"):
        inspect_model(folder)


@pytest.mark.parametrize(
    "header", [b"not json", b"[1, 2]", b'{"a": 3}', b'{"a": {"data_offsets": ["x", "y"]}}', b'{"a": {}}']
)
def test_damaged_header(folder, header):
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelError, match="damaged safetensors header"):
        check_safetensors(folder)


def test_a_header_that_claims_to_be_enormous_is_not_read(folder):
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(ModelError, match="truncated or not safetensors"):
        check_safetensors(folder)


def test_missing_tensors_are_never_filled_with_noise(folder):
    tensors = load_file(folder / WEIGHTS)
    dropped = next(name for name in tensors if name.endswith("mlp.gate.weight"))
    save_file({n: t for n, t in tensors.items() if n != dropped}, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelError, match="lacks 1 tensors that its config asks for") as error:
        load_model(folder)
    assert "gate.weight" in one_line(error)
    with pytest.raises(ModelError, match=r"holds [0-9,]+ of the [0-9,]+ parameters"):
        inspect_model(folder)


def test_a_missing_shard_is_named(folder):
    zoo.tiny_model("qwen2_moe").save_pretrained(folder, max_shard_size="60KB")
    (folder / WEIGHTS).unlink(missing_ok=True)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert inspect_model(folder).weights == "ok"
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of {len(shards)} weight files, such as {shards[1].name}"):
        inspect_model(folder)


def test_shapes_that_contradict_the_config(folder):
    edit_config(folder, vocab_size=64)
    with pytest.raises(ModelError) as error:
        load_model(folder)
    one_line(error)


def test_pickles_are_never_opened(folder):
    (folder / WEIGHTS).unlink()
    bomb = b"cos\nsystem\n(S'touch pickle-was-run'\ntR."
    (folder / "pytorch_model.bin").write_bytes(bomb)
    for read in (inspect_model, load_model):
        with pytest.raises(ModelError, match=r"found pytorch_model.bin, which is a pickle and is never opened"):
            read(folder)


def test_no_weights_at_all(folder):
    (folder / WEIGHTS).unlink()
    assert inspect_model(folder).weights == "absent"
    with pytest.raises(ModelError, match="found no weights"):
        load_model(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_experts": 10**9},
        {"hidden_size": 10**12},
        {"vocab_size": 10**15},
        {"num_attention_heads": 10**9},
    ],
)
def test_configs_that_would_not_end(folder, changes):
    edit_config(folder, **changes)
    for read in (load_config, inspect_model, load_model):
        with pytest.raises(ModelError, match="expected at most"):
            read(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_hidden_layers": -1},
        {"num_experts": -3},
        {"hidden_size": "wide"},
        {"hidden_size": 1.5},
        {"rope_parameters": 3},
    ],
)
def test_configs_that_make_no_sense(folder, changes):
    edit_config(folder, **changes)
    with pytest.raises(ModelError) as error:
        inspect_model(folder)
    one_line(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{broken", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ("{}", "names no model_type"),
        ('{"model_type": "frobnicate"}', "architecture 'frobnicate' is unknown"),
        ('{"model_type": "vit"}', "not a causal language model"),
    ],
)
def test_configs_that_are_none(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message) as error:
        inspect_model(tmp_path)
    one_line(error)


def test_names_that_lead_nowhere(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, message in [
        (tmp_path / "file", "is a file"),
        (tmp_path / "empty", "has no config.json"),
        (tmp_path / "absent", "does not exist"),
        ("a/b/c", "does not exist"),
        ("", "is empty"),
        ("bundled:nothing", "is not bundled"),
        ("bundled:../models", "is not bundled"),
    ]:
        with pytest.raises(ModelError, match=message):
            resolve_model(name)
    assert resolve_model("some-org/some-model") == "some-org/some-model"


def test_a_folder_without_tokenizer(folder):
    with pytest.raises(ModelError, match="no tokenizer") as error:
        load_tokenizer(folder)
    one_line(error)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_the_place_of_weights_is_refused_and_not_waited_for(folder):
    os.mkfifo(folder / "extra.safetensors")
    with pytest.raises(ModelError, match="no regular file"):
        load_model(folder)


def test_links_may_lead_inside_their_folder_and_a_snapshot_to_its_blobs(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1f", tmp_path / "models--a--b" / "blobs"
    shutil.copytree(bundled_folder("bundled:tiny"), snapshot)
    blobs.mkdir()
    (snapshot / "config.json").rename(blobs / "0e")
    (snapshot / "config.json").symlink_to(Path("..", "..", "blobs", "0e"))
    (snapshot / "same.json").symlink_to("tokenizer.json")
    assert inspect_model(snapshot).weights == "ok"
    shutil.copytree(snapshot, tmp_path / "copied", symlinks=True)
    (tmp_path / "copied" / "config.json").unlink()
    (tmp_path / "copied" / "config.json").symlink_to(blobs / "0e")  # somebody else's cache
    with pytest.raises(ModelError, match="a link that leaves its folder"):
        inspect_model(tmp_path / "copied")
