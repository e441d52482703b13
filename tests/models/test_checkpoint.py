"""Deltas: only what changed, and the same folder from base and delta as without it."""

from __future__ import annotations

import hashlib
import os
import shutil

import pytest
import torch
import zoo
from safetensors.torch import load_file

from pathmark.errors import ModelError
from pathmark.keys import digests
from pathmark.models import checkpoint, load_model
from pathmark.models.checkpoint import (
    apply_delta,
    base_digest,
    changed_tensors,
    read_delta,
    stored_tensors,
    write_delta,
    write_folder,
)
from pathmark.models.parts import part_parameters

FAMILIES = ["mixtral", "phimoe", "qwen3_moe", "olmoe", "deepseek_v2", "gpt_oss", "qwen2_moe"]


def make_base(folder, family, dtype=torch.bfloat16):
    zoo.tiny_model(family).to(dtype).save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_changed_tensors_change(tmp_path, family):
    base = make_base(tmp_path / "base", family)
    model = load_model(base)
    parameters = part_parameters(model, [3], ["router", "attention", "experts"])
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(torch.randn_like(parameter))
    changed = changed_tensors(model, parameters, base)
    write_folder(base, changed, tmp_path / "out")

    before = {k: v for f in base.glob("*.safetensors") for k, v in load_file(f).items()}
    after = {k: v for f in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(f).items()}
    assert before.keys() == after.keys()
    assert len(list(base.glob("*.safetensors"))) > 1  # sharded, and in the same shards
    assert {k: t.file.name for k, t in stored_tensors(base).items()} == {
        k: t.file.name for k, t in stored_tensors(tmp_path / "out").items()
    }
    different = {k for k in before if not torch.equal(before[k], after[k])}
    assert different == set(changed)
    assert all(".3." in name for name in different)
    # what transformers reads back is what was in memory, rounded to the base's dtype
    again = dict(load_model(tmp_path / "out").named_parameters())
    for name, parameter in parameters.items():
        torch.testing.assert_close(again[name], parameter.to(torch.bfloat16).float(), rtol=0, atol=0)


def test_base_and_delta_give_the_same_folder(tmp_path):
    base = make_base(tmp_path / "base", "qwen2_moe")
    model = load_model(base)
    parameters = part_parameters(model, [2, 3], ["router"])
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.mul_(2)
    changed = changed_tensors(model, parameters, base)
    assert set(changed) == set(parameters)
    write_folder(base, changed, tmp_path / "whole")
    write_delta(tmp_path / "delta.safetensors", changed, base_digest(base))
    assert (tmp_path / "delta.safetensors").stat().st_size < 4096
    apply_delta(base, tmp_path / "delta.safetensors", tmp_path / "rebuilt")
    whole = sorted(p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole").rglob("*"))
    assert whole == sorted(p.relative_to(tmp_path / "rebuilt") for p in (tmp_path / "rebuilt").rglob("*"))
    for name in whole:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "rebuilt" / name).read_bytes()


def test_unchanged_shards_are_shared_and_not_read_again(tmp_path, monkeypatch):
    base = make_base(tmp_path / "base", "qwen2_moe")
    for file in base.iterdir():
        os.utime(file, (1e9, 1e9))
    monkeypatch.setattr(digests, "_SETTLED_NS", -1)  # as if the files had been there for a while
    before = base_digest(base)
    name = "model.layers.3.mlp.gate.weight"
    place = stored_tensors(base)[name]
    written = write_folder(base, {name: torch.zeros(8, 32, dtype=torch.bfloat16)}, tmp_path / "out")
    shards = sorted(base.glob("*.safetensors"))
    assert len(shards) > 2
    for shard in shards:
        copy = tmp_path / "out" / shard.name
        assert (copy.read_bytes() == shard.read_bytes()) == (shard != place.file)
        if shard == place.file:  # never written through a link into the base
            assert copy.stat().st_ino != shard.stat().st_ino
    small = sum(f.stat().st_size for f in base.iterdir() if f.suffix != ".safetensors")
    sizes = {shard: shard.stat().st_size for shard in shards}
    assert written.changed == 8 * 32 * 2
    assert written.written == sizes[place.file] + small
    assert written.shared == sum(sizes.values()) - sizes[place.file]
    assert base_digest(base) == before
    read = []
    monkeypatch.setattr(digests, "sha256", lambda: read.append(1) or hashlib.sha256())
    assert base_digest(tmp_path / "out") != before
    assert len(read) == 1  # the shard that changed


def test_where_nothing_can_be_shared_everything_is_copied(tmp_path, monkeypatch):
    base = make_base(tmp_path / "base", "qwen2_moe")
    monkeypatch.setattr(checkpoint, "share_file", lambda source, target: False)
    written = write_folder(base, {}, tmp_path / "out")
    assert written.shared == written.changed == 0
    assert written.written == sum(file.stat().st_size for file in base.iterdir())
    for file in base.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
        assert (tmp_path / "out" / file.name).stat().st_ino != file.stat().st_ino


def test_a_clone_or_a_link_is_tried_and_failure_leaves_nothing(tmp_path, monkeypatch):
    source = tmp_path / "a"
    source.write_bytes(b"weights")
    assert checkpoint.share_file(source, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"weights"

    def refuse(*args):
        raise OSError

    monkeypatch.setattr(checkpoint, "_clone", refuse)
    monkeypatch.setattr(os, "link", refuse)
    assert not checkpoint.share_file(source, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_file_that_changes_is_read_again(tmp_path):
    file = tmp_path / "a"
    file.write_bytes(b"one")
    first = digests.file_digest(file)
    file.write_bytes(b"two")  # the same size, within the same tick of the clock
    assert digests.file_digest(file) != first


def test_wrong_bases_and_damaged_deltas_are_refused(tmp_path):
    base = make_base(tmp_path / "base", "qwen2_moe")
    name = "model.layers.3.mlp.gate.weight"
    tensors = {name: torch.zeros(8, 32, dtype=torch.bfloat16)}
    delta = tmp_path / "delta.safetensors"
    write_delta(delta, tensors, base_digest(base))
    with pytest.raises(ModelError, match="already exists"):
        write_delta(delta, tensors, base_digest(base))
    other = tmp_path / "other"
    shutil.copytree(base, other)
    shard = sorted(other.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(ModelError, match="another base"):
        apply_delta(other, delta, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError, match="does not fit"):
        write_folder(base, {name: torch.zeros(8, 31, dtype=torch.bfloat16)}, tmp_path / "out")
    with pytest.raises(ModelError, match="does not fit"):
        write_folder(base, {"no.such.tensor": torch.zeros(1)}, tmp_path / "out")
    delta.write_bytes(delta.read_bytes()[:-5])
    with pytest.raises(ModelError, match="not a sound safetensors"):
        read_delta(delta)
    with pytest.raises(ModelError, match="not a delta"):
        read_delta(sorted(base.glob("*.safetensors"))[0])
    assert not list(tmp_path.glob(".*"))  # nothing half-written was left behind


def test_an_existing_folder_is_never_touched(tmp_path):
    base = make_base(tmp_path / "base", "qwen2_moe")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="already exists"):
        write_folder(base, {}, tmp_path / "out")
