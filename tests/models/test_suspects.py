"""Suspects of every kind become one plain model, or one clear line."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from embed_helpers import save_family
from safetensors.torch import load_file, save_file

from pathmark.errors import ModelError
from pathmark.models import find_routers, load_model, record_routing
from pathmark.models.gptq import dequantize_gptq, dequantize_linear
from pathmark.models.suspects import load_suspect

IDS = torch.arange(5, 45).reshape(2, 20)
GROUP = 16


def pack(numbers, bits):
    """(count, N) numbers as (words, N) int32: an independent writer of the packed stream, bit by bit."""
    count, columns = numbers.shape
    stream = np.zeros((-(-count * bits // 32) * 32, columns), dtype=np.uint64)
    for b in range(bits):
        stream[b : count * bits : bits] = (numbers.astype(np.uint64) >> np.uint64(b)) & np.uint64(1)
    words = (stream.reshape(-1, 32, columns) << np.arange(32, dtype=np.uint64)[:, None]).sum(axis=1)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def quantize(weight_OI, bits, *, offset=1, shuffled=False):
    """(packed tensors, the weight they stand for): round to nearest in groups, zero points of their own."""
    w_IO = weight_OI.float().T
    g_idx = torch.arange(w_IO.shape[0]) // GROUP
    if shuffled:
        g_idx = g_idx[torch.randperm(len(g_idx), generator=torch.Generator().manual_seed(1))]
    groups, top = int(g_idx.max()) + 1, 2**bits - 1
    low = torch.stack([w_IO[g_idx == g].amin(0) for g in range(groups)])
    high = torch.stack([w_IO[g_idx == g].amax(0) for g in range(groups)])
    scales = ((high - low) / top).half()
    zeros = (-low / scales.float()).round().clamp(offset, top)
    q = (w_IO / scales.float()[g_idx] + zeros[g_idx]).round().clamp(0, top)
    parts = {
        "qweight": pack(q.numpy().astype(np.int64), bits),
        "qzeros": pack((zeros - offset).numpy().astype(np.int64).T, bits).T.contiguous(),
        "scales": scales,
        "g_idx": g_idx.int(),
    }
    return parts, (scales.float()[g_idx] * (q - zeros[g_idx])).T


def save_gptq(source, folder, *, bits=4, settings=None, split_names=False):
    """A GPTQ copy of a folder: attention and experts packed, routers, norms and embeddings left alone."""
    shutil.copytree(source, folder)
    tensors, expected = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        here = name
        if split_names:  # as quantizers name them that split the modules in memory
            for old, new in (
                ("block_sparse_moe", "mlp"),
                (".w1.", ".gate_proj."),
                (".w3.", ".up_proj."),
                (".w2.", ".down_proj."),
            ):
                here = here.replace(old, new)
        packed = tensor.ndim == 2 and any(part in name for part in ("_proj", ".w1.", ".w2.", ".w3."))
        if not packed:
            tensors[here] = tensor
            continue
        parts, plain = quantize(tensor, bits)
        tensors |= {f"{here.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
        expected[name] = plain
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, **(settings or {})}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("offset", "shuffled"), [(1, False), (0, True)])
def test_packed_linears_come_back_exactly(bits, offset, shuffled):
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(bits))
    parts, plain = quantize(weight, bits, offset=offset, shuffled=shuffled)
    assert torch.equal(dequantize_linear("x", parts, offset), plain)
    assert (plain - weight).abs().max() < 4 * 2.0**-bits * weight.abs().max()


@pytest.mark.parametrize(("family", "split_names"), [("qwen2_moe", False), ("mixtral", False), ("mixtral", True)])
def test_gptq_checkpoints_load_as_the_normal_architecture(tmp_path, family, split_names):
    base = save_family(tmp_path / "base", family)
    expected = save_gptq(base, tmp_path / "gptq", split_names=split_names)
    model = load_suspect(tmp_path / "gptq")
    # the same weights, written plainly
    plain = load_file(base / "model.safetensors") | {name: t.contiguous() for name, t in expected.items()}
    save_file(plain, base / "model.safetensors", metadata={"format": "pt"})
    twin = load_model(base)
    assert len(expected) > 100
    for (name, one), (_, two) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    for layer in [site.layer for site in find_routers(model)]:
        traces = []
        for each in (model, twin):
            with record_routing(each, [layer]) as trace:
                each(input_ids=IDS)
            traces.append(trace[layer])
        assert torch.equal(traces[0].decision_BTK, traces[1].decision_BTK)


def test_gptq_refusals_are_one_line(tmp_path):
    base = save_family(tmp_path / "base", "qwen2_moe")

    def refuse(folder, match):
        with pytest.raises(ModelError, match=match) as caught:
            load_suspect(folder)
        assert "\n" not in str(caught.value)

    good = tmp_path / "good"
    save_gptq(base, good)
    config = (good / "config.json").read_text()
    for settings, match in (
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "packed as 'marlin'"),
        ({"quant_method": "awq"}, "quantized with 'awq'; expected gptq"),
    ):
        (good / "config.json").write_text(json.dumps(json.loads(config) | {"quantization_config": settings}))
        refuse(good, match)
    (good / "config.json").write_text(config)
    tensors = load_file(good / "model.safetensors")
    name = next(n for n in tensors if n.endswith("experts.0.gate_proj.qweight"))
    for change, match in (
        (lambda t: t.pop(name), "lacks qweight"),
        (lambda t: t.update({name: t[name][:-1].contiguous()}), "do not fit together"),
        (lambda t: t.update({name: t[name].float()}), "expected packed int32"),
        (
            lambda t: t.update({name.replace("qweight", "g_idx"): t[name.replace("qweight", "g_idx")] + 99}),
            "names group",
        ),
        (lambda t: [t.pop(n) for n in list(t) if "experts.0.gate_proj" in n], "expected 16 experts"),
        (lambda t: t.pop("model.norm.weight"), "missing keys"),
    ):
        broken = dict(tensors)
        change(broken)
        save_file(broken, good / "model.safetensors", metadata={"format": "pt"})
        refuse(good, match)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A base, an adapter on its routers (bare parameters) and attention, and the model that both make."""
    peft = pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapter")
    base = save_family(folder / "base", "qwen2_moe")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=["mlp.gate.weight"])
    model = peft.get_peft_model(load_model(base), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "adapter")
    stated = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    stated["base_model_name_or_path"] = str(base)
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(stated))
    return folder, model.merge_and_unload()


def test_adapters_are_merged_into_their_base(adapted):
    folder, merged = adapted
    base = load_model(folder / "base")
    pattern = folder / "by-pattern"  # which never ends; the tensors' names say the same
    shutil.copytree(folder / "adapter", pattern)
    stated = json.loads((pattern / "adapter_config.json").read_text()) | {"target_modules": "(a|a|b?)*" * 9 + "!"}
    (pattern / "adapter_config.json").write_text(json.dumps(stated))
    for given in (folder / "adapter", pattern):
        model = load_suspect(given, base=folder / "base")
        changed = 0
        for (name, one), (_, two), (_, old) in zip(
            model.named_parameters(), merged.named_parameters(), base.named_parameters(), strict=True
        ):
            assert torch.allclose(one, two, atol=1e-6), name
            changed += not torch.equal(one, old)
        assert changed == 3 * 4  # router, q and v of every layer
        assert len(find_routers(model)) == 4


def test_adapters_that_do_not_fit_are_refused(adapted, tmp_path):
    folder, _ = adapted

    def refuse(match, *, base=folder / "base", config=None, tensors=None, drop=False):
        target = tmp_path / "adapter"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder / "adapter", target)
        if config is not None:
            stated = json.loads((target / "adapter_config.json").read_text()) | config
            (target / "adapter_config.json").write_text(json.dumps(stated))
        weights = target / "adapter_model.safetensors"
        if tensors is not None:
            state = load_file(weights)
            tensors(state)
            save_file(state, weights)
        if drop:
            weights.rename(target / "adapter_model.bin")
        with pytest.raises(ModelError, match=match) as caught:
            load_suspect(target, base=base)
        assert "\n" not in str(caught.value)

    other = save_family(tmp_path / "other", "mixtral")
    refuse("cannot be merged", base=other)
    refuse("never pickles", drop=True)
    refuse("expected LORA", config={"peft_type": "IA3"})
    refuse("asks for ranks", config={"r": 10**9})
    refuse("give its base model with --base", base=None)  # never the one that it names itself
    refuse("by the pattern", config={"exclude_modules": "(a|a)*b"})
    refuse("by the pattern", config={"rank_pattern": {"(x+x+)+y": 4}})
    refuse("do not fit", tensors=lambda state: state.pop(sorted(state)[0]))
    refuse(
        "do not fit", tensors=lambda state: state.update({"base_model.model.nowhere.lora_A.weight": torch.ones(4, 4)})
    )
    refuse("NaN or inf", tensors=lambda state: state[sorted(state)[0]].fill_(float("nan")))
    with pytest.raises(ModelError, match="takes no base"):
        load_suspect(folder / "base", base=folder / "base")


def test_plain_folders_of_any_dtype(tmp_path):
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        folder = save_family(tmp_path / str(dtype), "mixtral", dtype=dtype)
        assert {p.dtype for p in load_suspect(folder).parameters()} == {torch.float32}
        assert {p.dtype for p in load_suspect(folder, dtype=None).parameters()} == {dtype}


def test_bitsandbytes_is_named_where_it_is_missing(tmp_path, monkeypatch):
    folder = save_family(tmp_path / "base", "mixtral")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("pathmark.models.suspects.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="install it"):
        load_suspect(folder)


def test_bitsandbytes_checkpoints_load_through_transformers(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    base = save_family(tmp_path / "base", "qwen2_moe")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    AutoModelForCausalLM.from_pretrained(base, quantization_config=config).save_pretrained(tmp_path / "bnb")
    model, original = load_suspect(tmp_path / "bnb"), load_model(base)
    changed = [
        name
        for (name, one), (_, two) in zip(model.named_parameters(), original.named_parameters(), strict=True)
        if not torch.equal(one, two)
    ]
    assert any("q_proj" in name for name in changed)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert len(find_routers(model)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_against_the_library_that_writes_gptq(tmp_path, monkeypatch, bits):
    monkeypatch.setenv("GPTQMODEL_CPU_WORKERS", "2")
    library = pytest.importorskip("gptqmodel")
    from pathmark.models import bundled_segments

    source = save_family(tmp_path / "base", "qwen2_moe")
    config = json.loads((source / "config.json").read_text())
    quantizer = library.GPTQModel.load(str(source), library.QuantizeConfig(bits=bits, group_size=16), device="cpu")
    quantizer.quantize([text[:400] for text in bundled_segments()[:16]], batch_size=1)
    quantizer.save(str(tmp_path / "gptq"))
    settings = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    ours = dequantize_gptq(tmp_path / "gptq", settings)
    theirs = library.GPTQModel.load(
        str(tmp_path / "gptq"), device="cpu", backend=library.BACKEND.TORCH, dtype=torch.float16
    )
    compared = 0
    for name, module in theirs.model.named_modules():
        if hasattr(module, "dequantize_weight"):
            weight = module.dequantize_weight().T.float()
            assert torch.allclose(ours[f"{name}.weight"], weight, atol=2e-3 * float(weight.abs().max())), name
            compared += 1
    assert compared > config["num_hidden_layers"] * config["num_experts"]
    assert len(find_routers(load_suspect(tmp_path / "gptq"))) == config["num_hidden_layers"]
