"""`record_routing` beyond the plain case: failures, early stops, padding, checkpointing, adapters."""

from __future__ import annotations

import pytest
import torch
import zoo
from torch import nn

from pathmark.errors import ModelError
from pathmark.models import find_routers, record_routing, select_sites

IDS_BT = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(1))
LAST = 3


@pytest.fixture
def model():
    return zoo.tiny_model("qwen2_moe")


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


def record(model, ids_BT, layers=None, **kwargs):
    with torch.no_grad(), record_routing(model, layers, **kwargs) as trace:
        model(input_ids=ids_BT)
    return trace


def assert_same(a, b):
    torch.testing.assert_close(a.logits_BTE, b.logits_BTE, atol=1e-5, rtol=1e-5)
    assert torch.equal(a.decision_BTK.sort(-1).values, b.decision_BTK.sort(-1).values)


@pytest.mark.parametrize("culprit", ["embed_tokens", "layers.2", "layers.1.mlp.experts", "norm"])
def test_nothing_stays_hooked_when_the_forward_raises(model, culprit):
    broken = model.model.get_submodule(culprit)
    handle = broken.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("boom")))
    before = hooks(model)
    with pytest.raises(RuntimeError, match="boom"), record_routing(model):
        model(input_ids=IDS_BT)
    assert hooks(model) == before
    handle.remove()
    record(model, IDS_BT)  # and the next recording works


def test_nothing_stays_hooked_when_no_forward_runs(model):
    with pytest.raises(ModelError, match="expected one forward pass"), record_routing(model):
        pass
    assert hooks(model) == 0


def test_a_second_forward_in_the_block_is_refused(model):
    with record_routing(model) as trace:
        model(input_ids=IDS_BT)
        first = trace[LAST].logits_BTE
        with pytest.raises(ModelError, match="one forward pass"):
            model(input_ids=IDS_BT + 1)
    assert trace[LAST].logits_BTE is first
    assert hooks(model) == 0


def test_a_layer_called_by_itself_is_refused(model):
    site = find_routers(model)[0]
    with pytest.raises(ModelError, match="through the model itself"), record_routing(model):
        site.router(torch.zeros(3, 32))


def test_a_layer_that_was_not_recorded_is_named(model):
    trace = record(model, IDS_BT, layers=[1])
    with pytest.raises(ModelError, match=r"layer 3 was not recorded; got layers \[1\]"):
        trace[3]


def test_a_layer_asked_for_twice_is_recorded_once(model):
    assert list(record(model, IDS_BT, layers=[2, 2, 1]).layers) == [1, 2]


@pytest.mark.parametrize("wanted", [[0], [1, 2], [3]])
def test_early_stop_runs_nothing_above_and_changes_no_value(model, wanted):
    calls = []
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, i=i: calls.append(i))
        layer.mlp.experts.register_forward_hook(lambda *_, i=i: calls.append(f"experts {i}"))
    model.lm_head.register_forward_hook(lambda *_: calls.append("head"))
    whole = record(model, IDS_BT, wanted)
    assert "head" in calls
    calls.clear()
    partly = record(model, IDS_BT, wanted, stop_early=True)
    # the last wanted layer is left before its experts compute anything
    below = range(max(wanted))
    assert sorted(calls, key=str) == sorted([*below, *(f"experts {i}" for i in below)], key=str)
    for layer in wanted:
        assert_same(partly[layer], whole[layer])


def test_dense_layers_are_named_with_the_routed_ones():
    model = zoo.tiny_model("deepseek_v2")  # layer 0 is dense
    with pytest.raises(ModelError, match=r"layers 0, 7 have no router; this model routes in layers 1-3"):
        select_sites(find_routers(model), [0, 2, 7])
    with pytest.raises(ModelError, match="layers 0 have no router"), record_routing(model, [0, 1]):
        model(input_ids=IDS_BT)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_but_the_padding(model, side):
    pad_BT = torch.zeros(2, 5, dtype=torch.long)
    ids_BT = torch.cat([pad_BT, IDS_BT] if side == "left" else [IDS_BT, pad_BT], dim=1)
    mask_BT = (ids_BT != 0).long()
    text = slice(5, None) if side == "left" else slice(0, 12)
    plain = record(model, IDS_BT)
    with torch.no_grad(), record_routing(model) as padded:
        model(input_ids=ids_BT, attention_mask=mask_BT)
    for layer in range(LAST + 1):
        routing = padded[layer]
        assert torch.equal(routing.mask_BT, mask_BT.bool())
        torch.testing.assert_close(routing.logits_BTE[:, text], plain[layer].logits_BTE, atol=1e-4, rtol=1e-4)
        assert torch.equal(routing.decision_BTK[:, text], plain[layer].decision_BTK)
        assert (routing.decision_BTK[~mask_BT.bool()] == -1).all()
        assert not routing.probs_BTE[~mask_BT.bool()].any()


def test_without_a_mask_every_token_counts(model):
    assert record(model, IDS_BT)[0].mask_BT.all()


def test_a_call_of_the_body_alone_is_recorded(model):
    whole = record(model, IDS_BT)
    with torch.no_grad(), record_routing(model) as trace:
        model.model(input_ids=IDS_BT)
    for layer in range(LAST + 1):
        assert_same(trace[layer], whole[layer])
    with torch.no_grad(), record_routing(model) as trace:
        model(inputs_embeds=model.model.embed_tokens(IDS_BT))
    assert_same(trace[LAST], whole[LAST])


def test_llama4_whose_base_model_is_itself():
    model = zoo.tiny_model("llama4_text")
    whole = record(model, IDS_BT)
    with torch.no_grad(), record_routing(model) as trace:
        model.model(input_ids=IDS_BT)
    assert_same(trace[LAST], whole[LAST])


def test_without_gradients_the_logits_are_detached(model):
    with record_routing(model) as trace:
        model(input_ids=IDS_BT)
    assert not trace[LAST].logits_BTE.requires_grad


@pytest.mark.parametrize("model_type", ["qwen2_moe", "laguna", "deepseek_v3"])
@pytest.mark.parametrize("inside", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(model_type, inside):
    gradients = []
    for checkpointing in (False, True):
        model = zoo.tiny_model(model_type).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with record_routing(model, gradients=True) as trace:
            output = model(input_ids=IDS_BT, use_cache=False)
            loss = trace[LAST].probs_BTE.pow(2).sum() + output.logits.pow(2).mean()
            if inside:  # the layers run again while the hooks are still there
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-5, rtol=1e-4)


def test_lora_on_bare_router_parameters_is_part_of_the_logits(model):
    peft = pytest.importorskip("peft")
    before = record(model, IDS_BT)
    plain_weight = model.model.layers[LAST].mlp.gate.weight.detach().clone()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_parameters=["mlp.gate.weight"], target_modules=[]))
    assert_same(record(adapted, IDS_BT)[0], before[0])  # LoRA starts at zero

    wrapper = adapted.get_base_model().model.layers[LAST].mlp.gate
    with torch.no_grad():
        wrapper.lora_B["default"].weight.normal_()
    a_RH, b_ER = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
    weight_EH = plain_weight + wrapper.scaling["default"] * (b_ER @ a_RH).detach()
    seen = {}
    wrapper.base_layer.register_forward_hook(lambda m, args, output: seen.update(x_NH=args[0]))
    received = {}
    experts = adapted.get_base_model().model.layers[LAST].mlp.experts
    experts.register_forward_pre_hook(lambda m, args: received.update(chosen_NK=args[1]))
    with record_routing(adapted, gradients=True) as trace:
        adapted(input_ids=IDS_BT)

    routing = trace[LAST]
    assert (routing.logits_BTE - before[LAST].logits_BTE).abs().max() > 0.1
    expected_BTE = (seen["x_NH"] @ weight_EH.T).reshape(2, 12, -1)
    torch.testing.assert_close(routing.logits_BTE, expected_BTE, atol=1e-4, rtol=1e-4)
    assert torch.equal(routing.decision_BTK.flatten(0, 1), received["chosen_NK"])
    routing.probs_BTE.pow(2).sum().backward()
    assert wrapper.lora_A["default"].weight.grad.abs().sum() > 0


def test_lora_inside_a_router_that_is_a_module_is_refused():
    peft = pytest.importorskip("peft")
    model = zoo.tiny_model("afmoe")  # its router holds a Linear called gate
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=r".*router\.gate"))
    with pytest.raises(ModelError, match=r"merge_and_unload"):
        find_routers(adapted)
    assert find_routers(adapted.merge_and_unload())


def test_a_router_class_nobody_knows_says_so(model):
    class StrangeRouter(type(model.model.layers[0].mlp.gate)):
        pass

    model.model._can_record_outputs = {"router_logits": StrangeRouter}
    model._can_record_outputs = {"router_logits": StrangeRouter}
    for layer in model.model.layers:
        layer.mlp.gate.__class__ = StrangeRouter
    with pytest.raises(ModelError, match="StrangeRouter is not known"):
        find_routers(model)


def test_a_model_without_routers_says_so():
    with pytest.raises(ModelError, match="Sequential has no MoE router"):
        find_routers(nn.Sequential(nn.Linear(2, 2)))
