"""Where a model runs: what is asked for, what is there, and 16 bits with routers in 32."""

from __future__ import annotations

import pytest
import torch
import zoo
from embed_helpers import key_for, quick_config, save_family

from pathmark.embedding import Trainer
from pathmark.errors import ModelError
from pathmark.models import bundled_segments, devices, find_routers, load_model, load_tokenizer, record_routing
from pathmark.models.devices import Placement, open_model, refuse_narrower, settled
from pathmark.models.skeleton import build_skeleton
from pathmark.models.upper import recomputed_layers

IDS_BT = torch.randint(3, 100, (3, 12), generator=torch.Generator().manual_seed(1))
CPU = Placement(device="cpu")


def test_what_is_not_there_or_not_meant_is_said():
    with pytest.raises(ModelError, match="expected a device of auto, cpu"):
        Placement(device="gpu")
    with pytest.raises(ModelError, match="torch sees 0 CUDA devices"):
        Placement(device="cuda:3").chosen()
    with pytest.raises(ModelError, match="no mps device"):
        Placement(device="mps").chosen()
    with pytest.raises(ModelError, match="no way to cuda"):
        Placement(device="cuda").confined()
    assert Placement().confined().chosen() == torch.device("cpu")


def pretend(monkeypatch, *, devices, free):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))


def test_auto_takes_the_first_accelerator_and_spreads_what_it_cannot_hold(monkeypatch):
    pretend(monkeypatch, devices=2, free=100)
    assert Placement().chosen() == torch.device("cuda:0")
    assert not Placement().spread(80)
    assert Placement().spread(81)
    assert not Placement(device="cuda:1").spread(81)
    assert Placement(device="cuda:1").chosen().index == 1
    pretend(monkeypatch, devices=1, free=100)
    assert not Placement().spread(81)


def test_each_of_several_processes_takes_a_device_of_its_own(monkeypatch):
    pretend(monkeypatch, devices=4, free=100)
    monkeypatch.setenv("WORLD_SIZE", "8")  # two machines
    monkeypatch.setenv("LOCAL_RANK", "2")
    for device in ("auto", "cuda"):
        assert Placement(device=device).chosen() == torch.device("cuda:2")
    assert not Placement().spread(1000)
    with pytest.raises(ModelError, match="8 processes need a device each, got cuda:1 for all"):
        Placement(device="cuda:1").chosen()
    monkeypatch.setenv("LOCAL_RANK", "5")
    with pytest.raises(ModelError, match=r"no cuda:5: torch sees 4 CUDA devices"):
        Placement().chosen()
    assert Placement(device="cpu").chosen() == torch.device("cpu")


def test_auto_keeps_bf16_on_accelerators_alone(monkeypatch, tmp_path):
    zoo.tiny_model("qwen3_moe").bfloat16().save_pretrained(tmp_path / "narrow")
    zoo.tiny_model("qwen3_moe").save_pretrained(tmp_path / "wide")
    assert CPU.width(tmp_path / "narrow") == torch.float32
    assert Placement(device="cpu", dtype="bf16").width(tmp_path / "wide") == torch.bfloat16
    pretend(monkeypatch, devices=1, free=100)
    assert Placement().width(tmp_path / "narrow") == torch.bfloat16
    assert Placement().width(tmp_path / "wide") == torch.float32
    refuse_narrower(tmp_path / "narrow", Placement())
    with pytest.raises(ModelError, match="stored in 32 bits; held in 16"):
        refuse_narrower(tmp_path / "wide", Placement(dtype="bf16"))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "phimoe", "deepseek_v3", "gpt_oss", "olmoe"])
def test_in_16_bits_routers_stay_in_32_and_decide_by_that(family, tmp_path):
    zoo.tiny_model(family).bfloat16().save_pretrained(tmp_path)
    model = open_model(tmp_path, Placement(device="cpu", dtype="bf16"))
    wide = load_model(tmp_path)
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    with torch.no_grad(), record_routing(model) as trace:
        logits = model(input_ids=IDS_BT, use_cache=False).logits
    for site in find_routers(model):
        assert {p.dtype for p in site.router.parameters()} == {torch.float32}
        if not site.choice_bias and not site.group_limited:
            best = trace[site.layer].logits_BTE.topk(site.top_k).indices.sort(-1).values
            assert torch.equal(best, trace[site.layer].decision_BTK.sort(-1).values)
    with torch.no_grad():
        expected = wide(input_ids=IDS_BT, use_cache=False).logits
    assert (logits.float() - expected).norm() < 0.1 * expected.norm()


def test_on_the_meta_device_the_same_code_places_a_model_without_weights(tmp_path):
    config = zoo.tiny_config("qwen3_moe")
    model = settled(build_skeleton("here", config, False, torch.bfloat16).eval(), torch.device("meta"))
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    site = find_routers(model)[0]
    assert site.weight.dtype == torch.float32
    narrow = torch.empty(6, config.hidden_size, dtype=torch.bfloat16, device="meta")
    given = [value for value in site.router(narrow) if value.is_floating_point()]
    assert given
    assert {value.dtype for value in given} == {torch.float32}


def test_what_one_device_cannot_hold_gets_a_device_map(tmp_path, monkeypatch):
    zoo.tiny_model("qwen3_moe").bfloat16().save_pretrained(tmp_path)
    asked, given = [], []
    monkeypatch.setattr(Placement, "spread", lambda self, need: asked.append(need) or True)
    monkeypatch.setattr(devices, "load_model", lambda *a, **kw: given.append(kw["device_map"]) or load_model(*a, **kw))
    spread = open_model(tmp_path, Placement(device="cpu", dtype="bf16"))
    assert given == ["auto"]  # here there is but one device to spread over
    assert asked == [2 * sum(p.numel() for p in spread.parameters())]
    assert find_routers(spread)[0].weight.dtype == torch.float32
    monkeypatch.undo()
    with torch.no_grad():
        found = spread(input_ids=IDS_BT, use_cache=False).logits
        expected = open_model(tmp_path, Placement(device="cpu", dtype="bf16"))(input_ids=IDS_BT, use_cache=False).logits
    torch.testing.assert_close(found, expected)


def losses_of(base, placement, **loop):
    model = open_model(base, placement)
    config = quick_config(steps=4)
    config = type(config)(**vars(config) | {"loop": type(config.loop)(**vars(config.loop) | loop), "batch_size": 4})
    trainer = Trainer(model, load_tokenizer(base), key_for(base), list(bundled_segments()[:40]), config.build())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen = []
    trainer.run(after=lambda step, losses: seen.append(losses["loss"]))
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    return seen, changed, model


def test_training_in_16_bits_follows_that_in_32(tmp_path):
    base = save_family(tmp_path / "base", "qwen3_moe", dtype=torch.bfloat16)
    wide, changed, _ = losses_of(base, CPU)
    narrow, changed_narrow, model = losses_of(base, Placement(device="cpu", dtype="bf16"))
    assert changed_narrow <= changed  # what moves less than a digit of 16 bits waits in the wider copy
    assert {name for name in changed if "gate.weight" in name} <= changed_narrow
    assert any("experts" in name for name in changed_narrow)
    assert narrow == pytest.approx(wide, rel=0.03)
    assert {p.dtype for name, p in model.named_parameters() if "experts" in name} == {torch.bfloat16}


def test_computing_again_changes_nothing_but_memory(tmp_path):
    base = save_family(tmp_path / "base", "qwen3_moe")
    kept, _, _ = losses_of(base, CPU)
    again, _, model = losses_of(base, CPU, recompute=True)
    assert again == pytest.approx(kept, rel=1e-5)
    assert "forward" not in vars(model.model.layers[0])
    runs = []
    model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    with recomputed_layers(model):
        model(input_ids=IDS_BT, use_cache=False).logits.sum().backward()
    assert len(runs) == 2  # there and back
