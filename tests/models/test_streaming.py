"""A streamed model routes as the whole one does, reads each layer once, and keeps nothing."""

from __future__ import annotations

import json
from types import SimpleNamespace

import psutil
import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pathmark.errors import ModelError
from pathmark.models import (
    device_of,
    find_routers,
    is_streamed,
    layer_weights,
    load_model,
    record_routing,
    refuse_bad_weights,
    should_stream,
    stream_model,
    streaming,
)
from pathmark.models.upper import grafted
from pathmark.verification import record_routes

IDS_BT = torch.randint(3, 100, (5, 12), generator=torch.Generator().manual_seed(1))
MASK_BT = torch.ones_like(IDS_BT)
MASK_BT[3, 9:] = 0
FAMILIES = [
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "phimoe", "gpt_oss",
    "dbrx", "deepseek_v4", "gemma4_text", "jetmoe", "llama4", "longcat_flash", "zaya",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen")
    zoo.tiny_model("qwen2_moe").save_pretrained(path)
    return path


def record(model, layers=None, **kwargs):
    with torch.no_grad(), record_routing(model, layers, **kwargs) as trace:
        model(input_ids=IDS_BT, attention_mask=MASK_BT, use_cache=False)
    return trace


def assert_same(one, other, atol=1e-5):
    assert one.layers.keys() == other.layers.keys()
    for layer in one.layers:
        torch.testing.assert_close(one[layer].logits_BTE, other[layer].logits_BTE, atol=atol, rtol=0)
        decisions = (trace[layer].decision_BTK.sort(-1).values for trace in (one, other))
        assert torch.equal(*decisions)


def in_memory(model):
    return {name for name, parameter in model.named_parameters() if not parameter.is_meta}


@pytest.fixture
def read(monkeypatch):
    """Names of the parameters that were read, in order."""
    names = []

    def cook(recipe, model):
        names.extend(recipe.targets)
        return original(recipe, model)

    original = streaming.cook
    monkeypatch.setattr(streaming, "cook", cook)
    return names


def check_family(model_type, path):
    zoo.tiny_model(model_type).bfloat16().save_pretrained(path, max_shard_size="60KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    whole, streamed = load_model(path), stream_model(path, rows_at_once=2)
    assert_same(record(whole), record(streamed))
    layers = {site.name.split(".layers.")[0] for site in find_routers(streamed)}
    assert layers
    assert not [name for name in in_memory(streamed) if any(part.isdigit() for part in name.split("."))]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_routing_is_that_of_the_model_loaded_whole(model_type, tmp_path):
    check_family(model_type, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [t for t in zoo.moe_types() if t not in {*FAMILIES, "doge"}])
def test_routing_of_every_other_family(model_type, tmp_path):
    check_family(model_type, tmp_path)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_the_checkpoints_own_type(model_type, tmp_path):
    zoo.tiny_model(model_type).bfloat16().save_pretrained(tmp_path)
    whole, streamed = load_model(tmp_path, dtype=None), stream_model(tmp_path, dtype=None)
    assert_same(record(whole), record(streamed), atol=0)
    with layer_weights(streamed, 2):
        assert {p.dtype for n, p in streamed.named_parameters() if ".layers.2." in n} == {
            p.dtype for n, p in whole.named_parameters() if ".layers.2." in n
        }


def test_outputs_and_tied_heads(tmp_path):
    config = zoo.tiny_config("qwen2_moe").to_dict() | {"tie_word_embeddings": True}
    config.pop("model_type")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2_moe", **config), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    whole, streamed = load_model(tmp_path), stream_model(tmp_path)
    with torch.no_grad():
        expected = whole(input_ids=IDS_BT, attention_mask=MASK_BT).logits
    torch.testing.assert_close(streamed(input_ids=IDS_BT, attention_mask=MASK_BT).logits, expected)
    assert not any("lm_head" in name for name in in_memory(streamed))


def test_the_embedding_stays_and_nothing_else_does(folder):
    streamed = stream_model(folder)
    kept = {"model.embed_tokens.weight", "model.norm.weight"}
    assert in_memory(streamed) == kept
    record(streamed)
    assert in_memory(streamed) == kept
    record(streamed, [2], stop_early=True)
    assert in_memory(streamed) == kept
    assert device_of(streamed) == torch.device("cpu")
    assert is_streamed(streamed)
    assert not is_streamed(load_model(folder))


def test_a_forward_that_fails_leaves_no_weights(folder):
    streamed = stream_model(folder)
    broken = streamed.model.layers[1].mlp
    handle = broken.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
    with pytest.raises(RuntimeError, match="boom"):
        streamed(input_ids=IDS_BT)
    assert in_memory(streamed) == {"model.embed_tokens.weight", "model.norm.weight"}
    handle.remove()
    assert_same(record(load_model(folder)), record(streamed))


def test_layers_are_read_once_and_none_above_the_last_wanted_one(folder, read):
    streamed = stream_model(folder, rows_at_once=1)
    read.clear()
    record(streamed, [1, 2], stop_early=True)
    assert len(read) == len(set(read))
    assert {name.split(".")[2] for name in read} == {"0", "1", "2"}


def test_rows_in_pieces_of_any_size(folder):
    whole = record(load_model(folder), [1, 3])
    for rows in (1, 2, 3, 4, 5, 99):
        assert_same(whole, record(stream_model(folder, rows_at_once=rows), [1, 3], stop_early=True))


def test_as_many_rows_as_tokens(folder):
    """(tokens, x) and (batch, x) have the same shape there."""
    ids_BT = IDS_BT.repeat(3, 1)[:12]
    traces = []
    for model in (load_model(folder), stream_model(folder, rows_at_once=5)):
        with torch.no_grad(), record_routing(model) as trace:
            model(input_ids=ids_BT, use_cache=False)
        traces.append(trace)
    assert_same(*traces)


def test_verification_takes_it_as_any_model(folder):
    rows = [tuple(row[: 6 + i]) for i, row in enumerate(IDS_BT.tolist())]
    prefix = [(7, 8, 9), (), (7, 8, 9), (), ()]
    one, other = (record_routes(m, rows, [2, 3], prefix=prefix) for m in (load_model(folder), stream_model(folder)))
    for layer in (2, 3):
        assert abs(one.probs[layer] - other.probs[layer]).max() < 1e-6
        assert (one.decisions[layer] == other.decisions[layer]).all()


def test_experts_are_filled_in_place(folder, monkeypatch):
    """Gathering and stacking them would hold a layer twice."""
    streamed = stream_model(folder)

    def stack(*args, **kwargs):
        raise AssertionError("stacked")

    monkeypatch.setattr(torch, "stack", stack)
    whole = load_file(folder / "model.safetensors")
    with layer_weights(streamed, 1):
        fused = streamed.model.layers[1].mlp.experts.gate_up_proj
        for expert in range(fused.shape[0]):
            at = f"model.layers.1.mlp.experts.{expert}."
            parts = [whole[f"{at}gate_proj.weight"], whole[f"{at}up_proj.weight"]]
            assert torch.equal(fused[expert], torch.cat(parts))
    assert streamed.model.layers[1].mlp.experts.gate_up_proj.is_meta


def test_progress(folder):
    seen = []
    record(stream_model(folder, progress=lambda done, total: seen.append((done, total))), [2], stop_early=True)
    assert seen == [(1, 4), (2, 4), (3, 4)]


def test_layer_weights_of_a_model_that_is_not_streamed(folder):
    model = load_model(folder)
    with layer_weights(model, 1):
        assert not model.model.layers[1].mlp.gate.weight.is_meta


def test_a_graft_between_streamed_models_is_that_of_loaded_ones(folder, tmp_path):
    zoo.tiny_model("qwen2_moe", seed=5).save_pretrained(tmp_path / "other")
    found = []
    for load in (load_model, stream_model):
        model, donor = load(tmp_path / "other"), load(folder)
        with grafted(model, donor, 2):
            found.append(record(model, [2, 3]))
        plain = record(model, [2, 3])
    assert_same(*found)
    assert not torch.allclose(plain[2].logits_BTE, found[1][2].logits_BTE, atol=1e-2)
    assert not [name for name in in_memory(model) if any(part.isdigit() for part in name.split("."))]


def test_it_is_chosen_when_the_weights_exceed_half_of_the_free_memory(folder, monkeypatch):
    elements = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    for free, dtype, expected in [
        (8 * elements + 8, torch.float32, False),
        (8 * elements - 8, torch.float32, True),
        (8 * elements - 8, None, True),  # stored as float32
        (8 * elements - 8, torch.bfloat16, False),
    ]:
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free))
        assert should_stream(folder, dtype=dtype) is expected
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=12 * elements))
    assert (should_stream(folder), should_stream(folder, copies=2)) == (False, True)


def test_a_layer_that_does_not_fit_is_said_beforehand(folder, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(ModelError, match="for its embedding and largest layer"):
        stream_model(folder)


def changed(folder, out, change):
    """A copy of the folder whose tensors went through `change`."""
    out.mkdir()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text((folder / "config.json").read_text())
    return out


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.gate.weight", "model.layers.1.mlp.experts.3.up_proj.weight", "model.norm.weight"]
)
def test_weights_that_are_no_numbers(folder, tmp_path, name, value):
    bad = changed(folder, tmp_path / "bad", lambda tensors: tensors[name].view(-1)[5:6].fill_(value))
    with pytest.raises(ModelError, match="holds NaN or inf"):
        record(stream_model(bad))
    with pytest.raises(ModelError, match="holds NaN or inf"):
        refuse_bad_weights(load_model(bad))
    refuse_bad_weights(load_model(folder))


def test_finite_weights_that_overflow_are_no_recording(folder, tmp_path):
    bad = changed(folder, tmp_path / "bad", lambda t: t["model.layers.1.mlp.gate.weight"].sign_().mul_(3e38))
    for model in (load_model(bad), stream_model(bad)):
        with pytest.raises(ModelError, match="router of layer 1 computes NaN or inf"):
            record(model)


def test_tokens_beyond_the_embedding(folder):
    for model in (load_model(folder), stream_model(folder)):
        with pytest.raises(ModelError, match="token 128 is beyond the model's embedding of 128"), record_routing(model):
            model(input_ids=IDS_BT.clamp(min=128))


def test_what_it_refuses(folder, tmp_path, monkeypatch):
    def drop(tensors):
        del tensors["model.layers.0.self_attn.q_proj.weight"]

    def lie(tensors):
        tensors["model.layers.0.mlp.gate.weight"] = tensors["model.layers.0.mlp.gate.weight"].T.contiguous()

    def fewer_experts(tensors):
        for part in ("gate", "up", "down"):
            del tensors[f"model.layers.3.mlp.experts.7.{part}_proj.weight"]

    def one_matrix_less(tensors):
        del tensors["model.layers.3.mlp.experts.7.up_proj.weight"]

    def packed(tensors):
        tensors["model.layers.0.mlp.gate.weight"] = tensors["model.layers.0.mlp.gate.weight"].to(torch.int8)

    for i, (change, words) in enumerate(
        [
            (drop, "lack 1 tensors that the config asks for, such as model.layers.0.self_attn.q_proj.weight"),
            (lie, r"gate.weight is stored with shape \(32, 8\); its config says \(8, 32\)"),
            (fewer_experts, r"experts.down_proj is stored with shape \(7, 32, 16\); its config says \(8, 32, 16\)"),
            (one_matrix_less, "do not make it"),
            (packed, "stored as I8, which is quantized or foreign; streaming reads plain safetensors"),
        ]
    ):
        with pytest.raises(ModelError, match=words):
            stream_model(changed(folder, tmp_path / str(i), change))
    quantized = changed(folder, tmp_path / "quantized", lambda tensors: None)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match=r"is quantized \(gptq\); streaming reads plain safetensors"):
        stream_model(quantized)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert should_stream(folder)
    assert not should_stream(quantized)
