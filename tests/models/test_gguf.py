"""GGUF files become folders that say the same; damaged, dense and unknown ones become one clear line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM
from zoo import tiny_config

from pathmark.errors import ModelError
from pathmark.front_door.unpack import unpack
from pathmark.models import load_model
from pathmark.models.loading import load_config

IDS = torch.arange(5, 45).reshape(2, 20)
Q8 = gguf.GGMLQuantizationType.Q8_0
OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = tiny_config("qwen3_moe")
    config.norm_topk_prob = True  # as llama.cpp computes it, always
    return Qwen3MoeForCausalLM(config).float().eval()


def write(path, model, *, packed=False, leave_out="", architecture="qwen3moe", **more):
    """A file as llama.cpp's converter would write it, from its published names: an independent writer."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head = model.model.layers[0].self_attn.head_dim
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_vocab_size(config.vocab_size)
    for name, value in more.items():
        writer.add_uint16(name.replace("_", "."), value)
    tensors = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for layer in range(config.num_hidden_layers):
        tensors |= {f"blk.{layer}.{to}": f"model.layers.{layer}.{name}" for to, name in OF_A_LAYER.items()}
    state = {to: model.state_dict()[f"{name}.weight"] for to, name in tensors.items()}
    for layer in range(config.num_hidden_layers):
        experts = model.model.layers[layer].mlp.experts
        gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)
        state |= {f"blk.{layer}.ffn_gate_exps": gate, f"blk.{layer}.ffn_up_exps": up}
        state[f"blk.{layer}.ffn_down_exps"] = experts.down_proj.detach()
    for name, tensor in state.items():
        if name == leave_out:
            continue
        array = np.ascontiguousarray(tensor.numpy())
        if packed and array.ndim > 1 and array.shape[-1] % 32 == 0 and "gate_inp" not in name:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(array, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(f"{name}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_the_folder_says_what_the_file_says(model, tmp_path):
    found = unpack(write(tmp_path / "m.gguf", model), tmp_path / "out")
    there = load_model(tmp_path / "out")
    assert all(torch.equal(p, model.state_dict()[name]) for name, p in there.state_dict().items())
    assert torch.equal(logits(there), logits(model))
    assert found.found.architecture == "qwen3moe"
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
    done = subprocess.run(
        [sys.executable, "-m", "pathmark.cli.main", "unpack", tmp_path / "m.gguf", "-o", tmp_path / "out", "--json"],
        capture_output=True, text=True, env={k: v for k, v in os.environ.items() if k != "PATHMARK_NO_SANDBOX"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["architecture"] == "qwen3moe"
    assert torch.equal(logits(load_model(tmp_path / "out")), logits(model))


def test_half_the_space(model, tmp_path):
    unpack(write(tmp_path / "m.gguf", model), tmp_path / "out", dtype="bf16")
    there = load_model(tmp_path / "out", dtype=None)
    assert {p.dtype for p in there.parameters()} == {torch.bfloat16}
    for name, p in there.named_parameters():
        assert torch.equal(p, model.get_parameter(name).bfloat16())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path, model: path.write_bytes(b"PK\3\4 something else"), "is no GGUF file"),
        (lambda path, model: path.write_bytes(write(path, model).read_bytes()[:3000]), "damaged or cut off"),
        (lambda path, model: write(path, model, leave_out="blk.1.ffn_down_exps"), "1 missing keys"),
        (lambda path, model: write(path, model, architecture="nobodysmoe"), "'nobodysmoe'"),
        (lambda path, model: write(path, model, split_count=3), "one of 3 parts"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_leaves_nothing(make, said, model, tmp_path):
    path = tmp_path / "m.gguf"
    make(path, model)
    with pytest.raises(ModelError, match=said) as refused:
        unpack(path, tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.gguf"]


def test_nothing_is_overwritten(model, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="already exists"):
        unpack(write(tmp_path / "m.gguf", model), tmp_path / "out")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ModelError, match="which is a folder"):
        unpack(tmp_path, tmp_path / "out")
