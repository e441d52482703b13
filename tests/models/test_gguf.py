"""GGUF files become folders that say the same; damaged, dense and unknown ones become one clear line."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from types import SimpleNamespace

import gguf
import numpy as np
import psutil
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import Qwen2MoeForCausalLM, Qwen3MoeForCausalLM
from zoo import tiny_config

from pathmark.cli.main import cli
from pathmark.errors import ModelError, VerificationError
from pathmark.front_door import sandbox
from pathmark.front_door.unpack import unpack
from pathmark.models import bundled_folder, load_model
from pathmark.models.loading import load_config
from pathmark.progress import Silent

IDS = torch.arange(5, 45).reshape(2, 20)
Q8 = gguf.GGMLQuantizationType.Q8_0
ATTENTION = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
}
OF_A_LAYER = {
    "qwen3moe": ATTENTION
    | {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"},
    "qwen2moe": ATTENTION
    | {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
    | {f"ffn_{part}_shexp.weight": f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")}
    | {"ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight"},
}
EXPERTS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")


def small(family):
    """A random model of a family, as llama.cpp computes it: Qwen3's chosen experts sum to one, Qwen2's do not."""
    torch.manual_seed(0)
    config = tiny_config(family)
    config.norm_topk_prob = family == "qwen3_moe"
    kind = Qwen3MoeForCausalLM if family == "qwen3_moe" else Qwen2MoeForCausalLM
    model = kind(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(scope="module")
def model():
    return small("qwen3_moe")


def stored(model, architecture):
    """Name in the file -> tensor, from llama.cpp's published names."""
    state = model.state_dict()
    found = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for layer, block in enumerate(model.model.layers):
        for to, of in OF_A_LAYER[architecture].items():
            tensor = state[f"model.layers.{layer}.{of}"]
            found[f"blk.{layer}.{to}"] = tensor[0] if to.startswith("ffn_gate_inp_shexp") else tensor  # a vector there
        gate, up = block.mlp.experts.gate_up_proj.detach().chunk(2, dim=1)
        parts = dict(zip(EXPERTS, (gate, up, block.mlp.experts.down_proj.detach()), strict=True))
        found |= {f"blk.{layer}.{name}": part for name, part in parts.items()}
    return found


def write(path, model, *, architecture=None, packed=False, leave_out="", extra=(), said=()):
    """A file as llama.cpp's converter would write it: an independent writer."""
    config = model.config
    layout = {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe"}[config.model_type]
    writer = gguf.GGUFWriter(path, architecture or layout)
    head = model.model.layers[0].self_attn.head_dim
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if not any("expert_feed_forward_length" in name for name, _ in said):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if layout == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_vocab_size(config.vocab_size)
    for name, value in said:
        (writer.add_string if isinstance(value, str) else writer.add_uint16)(name, value)
    tensors = {name: tensor for name, tensor in stored(model, layout).items() if name != leave_out}
    for name, tensor in (tensors | dict(extra)).items():
        array = np.ascontiguousarray(tensor.numpy())
        if packed and array.ndim > 1 and array.shape[-1] % 32 == 0 and "gate_inp" not in name:
            writer.add_tensor(name, gguf.quants.quantize(array, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_the_folder_says_what_the_file_says(family, tmp_path):
    model = small(family)
    found = unpack(write(tmp_path / "m.gguf", model), tmp_path / "out")
    there = load_model(tmp_path / "out")
    assert there.state_dict().keys() == model.state_dict().keys()
    model.save_pretrained(tmp_path / "saved")
    in_the_hubs_layout = load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == in_the_hubs_layout
    assert all(torch.equal(p, model.state_dict()[name]) for name, p in there.state_dict().items())
    assert torch.allclose(logits(there), logits(model), atol=1e-5)
    assert found.found.architecture == family.replace("_", "")
    assert found.found.packed == {"F32": len(gguf.GGUFReader(tmp_path / "m.gguf").tensors)}
    assert not found.found.tokenizer
    assert "Its tokenizer could not be read" in found.words()


def test_its_config_is_the_models_own(model, tmp_path):
    # transformers gives Qwen3-MoE experts of its default width, and 1e-6 in 32 bits is no 1e-6 any more
    unpack(write(tmp_path / "m.gguf", model), tmp_path / "out")
    config = load_config(tmp_path / "out")
    assert config.moe_intermediate_size == model.config.moe_intermediate_size
    assert config.rms_norm_eps == model.config.rms_norm_eps
    assert not hasattr(config, "quantization_config")


def test_packed_weights_are_what_an_engine_computes_with(model, tmp_path):
    found = unpack(write(tmp_path / "m.gguf", model, packed=True), tmp_path / "out")
    assert found.found.packed["Q8_0"] > found.found.packed["F32"] / 4
    there = load_model(tmp_path / "out")
    for name in ("model.layers.2.self_attn.q_proj.weight", "model.layers.1.mlp.experts.gate_up_proj"):
        kept, given = there.state_dict()[name].reshape(-1, 32), model.state_dict()[name].reshape(-1, 32)
        scale = given.abs().amax(1, keepdim=True) / 127  # of each block of 32; stored in 16 bits
        assert torch.allclose(kept, (given / scale).round() * scale.half(), atol=1e-6), name
        assert not torch.equal(kept, given)
    for site in ("model.layers.1.mlp.gate.weight", "model.norm.weight"):
        assert torch.equal(there.state_dict()[site], model.state_dict()[site])


def test_the_command_reads_in_a_sandbox(model, tmp_path):
    write(tmp_path / "m.gguf", model)
    words = [sys.executable, "-m", "pathmark.cli.main", "unpack", tmp_path / "m.gguf", "-o", tmp_path / "out", "--json"]
    env = {k: v for k, v in os.environ.items() if k != "PATHMARK_NO_SANDBOX"}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["architecture"] == "qwen3moe"
    assert torch.allclose(logits(load_model(tmp_path / "out")), logits(model), atol=1e-5)


def test_unless_told_otherwise(model, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(sandbox, "run", lambda job, limits, say: asked.append(limits) or job(Silent()))
    write(tmp_path / "m.gguf", model)
    for number, more in enumerate([[], ["--no-sandbox"]]):
        monkeypatch.delenv("PATHMARK_NO_SANDBOX", raising=False)
        done = CliRunner().invoke(cli, ["unpack", str(tmp_path / "m.gguf"), "-o", str(tmp_path / f"{number}"), *more])
        assert done.exit_code == 0, done.output
        assert len(asked) == 1  # by the first


def test_a_sandbox_that_is_ended_leaves_nothing(model, tmp_path, monkeypatch):
    def ended(job, limits, say):
        job(Silent())
        raise VerificationError("the process that reads the suspect ended")

    monkeypatch.setattr(sandbox, "run", ended)
    with pytest.raises(VerificationError):
        unpack(write(tmp_path / "m.gguf", model), tmp_path / "out", sandboxed=True)
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def test_half_the_space(model, tmp_path):
    unpack(write(tmp_path / "m.gguf", model), tmp_path / "out", dtype="bf16")
    there = load_model(tmp_path / "out", dtype=None)
    assert {p.dtype for p in there.parameters()} == {torch.bfloat16}
    for name, p in there.named_parameters():
        assert torch.equal(p, model.get_parameter(name).bfloat16())


def test_what_lies_beside_the_file_is_not_read(model, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "/nowhere"}')
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "auto_map": {"AutoConfig": "evil.Config"}}')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((bundled_folder("bundled:tiny") / name).read_bytes())
    found = unpack(write(tmp_path / "m.gguf", model), tmp_path / "out")
    assert not found.found.tokenizer
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    assert torch.allclose(logits(load_model(tmp_path / "out")), logits(model), atol=1e-5)


def refused(tmp_path, said):
    """Unpacking is refused in one line that says this, and leaves nothing."""
    with pytest.raises(ModelError, match=said) as error:
        unpack(tmp_path / "m.gguf", tmp_path / "out")
    assert str(error.value).isprintable()
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_no_tensor_may_be_missing(family, tmp_path):
    model = small(family)
    names = [name for name in stored(model, family.replace("_", "")) if name.startswith(("blk.1.", "token", "output_"))]
    assert len(names) > 12
    for name in names:
        write(tmp_path / "m.gguf", model, leave_out=name)
        refused(tmp_path, r"lacks 1 tensors|weights, of which|could not be read|no MoE router")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"extra": [("blk.1.attn_q.bias", torch.ones(32))]}, "weights, of which the unpacked model has"),
        ({"extra": [("blk.1.ffn_up_exps.scale", torch.ones(8))]}, "weights, of which the unpacked model has"),
        ({"said": [("qwen3moe.rope.scaling.type", "yarn")]}, "such as qwen3moe.rope.scaling.type"),
        ({"said": [("qwen3moe.expert_feed_forward_length", "x")]}, "damaged or cut off"),
        ({"said": [("split.count", 3)]}, "one of 3 parts"),
        ({"architecture": "llama"}, "holds the architecture 'llama'; expected qwen2moe or qwen3moe"),
        ({"architecture": "x\x1b]0;owned\x07" + "y" * 99}, "holds the architecture"),
    ],
)
def test_what_would_get_lost_is_refused(more, said, model, tmp_path):
    write(tmp_path / "m.gguf", model, **more)
    refused(tmp_path, said)


def test_damaged_files_are_refused(model, tmp_path):
    whole = write(tmp_path / "m.gguf", model).read_bytes()
    for damaged, said in ((b"PK\3\4 something else", "is no GGUF file"), (whole[:3000], "damaged or cut off")):
        (tmp_path / "m.gguf").write_bytes(damaged)
        refused(tmp_path, said)


def test_a_list_without_end_is_no_wait(model, tmp_path):
    write(tmp_path / "m.gguf", model, said=[("some.list", "?" * 20)])
    whole = (tmp_path / "m.gguf").read_bytes()
    place = whole.index(b"some.list") + len(b"some.list")
    endless = struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8, 2**60)
    (tmp_path / "m.gguf").write_bytes(whole[:place] + endless)
    refused(tmp_path, "damaged or cut off")


def test_too_little_room_is_told_before_the_work(model, tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    write(tmp_path / "m.gguf", model)
    refused(tmp_path, "GB unpacked, and there are 0.0 GB of memory; try --dtype bf16")


def test_nothing_is_overwritten(model, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="already exists"):
        unpack(write(tmp_path / "m.gguf", model), tmp_path / "out")


def test_who_verifies_the_file_itself_is_told_what_to_do(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"m.gguf is a file; .* unpack it first: pathmark unpack .*m.gguf -o FOLDER"):
        load_model(tmp_path / "m.gguf")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ModelError, match="which is a folder"):
        unpack(tmp_path, tmp_path / "out")
