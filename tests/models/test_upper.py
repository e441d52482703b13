"""Running the upper layers from cached hidden states gives what the whole model gives."""

from __future__ import annotations

import pytest
import torch
import zoo

from pathmark.errors import ModelError
from pathmark.models import find_routers, record_routing
from pathmark.models.upper import (
    body,
    can_run_from,
    grafted,
    hidden_at_layer,
    layer_stack,
    rotation_between,
    without_layers_below,
)

IDS_BT = torch.randint(3, 100, (3, 14), generator=torch.Generator().manual_seed(1))
MASK_BT = torch.ones_like(IDS_BT)
MASK_BT[1, 9:] = 0


@pytest.mark.parametrize(
    "family",
    ["mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe"],
)
def test_upper_layers_from_the_cache(family):
    model = zoo.tiny_model(family)
    stack = layer_stack(model, find_routers(model)[0])
    layers = list(stack)
    assert can_run_from(model, stack, 2, IDS_BT, MASK_BT)
    hidden = hidden_at_layer(model, stack, 2, IDS_BT, MASK_BT)
    with torch.no_grad():
        whole = body(model)(input_ids=IDS_BT, attention_mask=MASK_BT, use_cache=False).last_hidden_state
        with without_layers_below(stack, 2):
            calls = []
            handle = layers[0].register_forward_hook(lambda *a: calls.append(1))
            upper = body(model)(inputs_embeds=hidden, attention_mask=MASK_BT, use_cache=False).last_hidden_state
            handle.remove()
    keep = MASK_BT.bool()
    torch.testing.assert_close(upper[keep], whole[keep], atol=1e-5, rtol=1e-5)
    assert not calls
    assert list(stack) == layers  # everything is back


def test_the_layers_are_back_even_after_an_error():
    model = zoo.tiny_model("qwen2_moe")
    stack = layer_stack(model, find_routers(model)[0])
    layers, names = list(stack), [name for name, _ in model.named_parameters()]
    with pytest.raises(RuntimeError, match="boom"), without_layers_below(stack, 3):
        raise RuntimeError("boom")
    assert list(stack) == layers
    assert [name for name, _ in model.named_parameters()] == names


def test_families_that_pass_more_than_hidden_states_take_the_long_way():
    model = zoo.tiny_model("zaya")  # its routers hand their own state from layer to layer
    stack = layer_stack(model, find_routers(model)[0])
    assert not can_run_from(model, stack, 2, IDS_BT, MASK_BT)


def routing(model, layer):
    with torch.no_grad(), record_routing(model, [layer]) as trace:
        model(input_ids=IDS_BT, attention_mask=MASK_BT)
    return trace[layer].probs_BTE[MASK_BT.bool()]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_a_model_on_another_s_lower_part(family):
    """Broken below and sound above, it routes on the original's lower layers as it did before it was broken."""
    original, model, whole = (zoo.tiny_model(family) for _ in range(3))  # of one seed
    stack = layer_stack(model, find_routers(model)[0])
    layers, embedding = list(stack), model.get_input_embeddings()
    with torch.no_grad():
        for part in (*layers[:2], embedding):
            for parameter in part.parameters():
                parameter.copy_(torch.randn_like(parameter) * parameter.std())
        layers[2].input_layernorm.weight.mul_(1.5)  # its own upper part is not the original's
        layer_stack(whole, find_routers(whole)[0])[2].input_layernorm.weight.mul_(1.5)
    expected, broken = routing(whole, 2), routing(model, 2)
    with grafted(model, original, 2):
        fed = routing(model, 2)
    torch.testing.assert_close(fed, expected)
    assert not torch.allclose(broken, expected, atol=1e-2)
    assert list(stack) == layers
    assert model.get_input_embeddings() is embedding
    torch.testing.assert_close(routing(model, 2), broken)


def test_a_graft_is_undone_after_an_error_and_refused_between_builds():
    original, model = zoo.tiny_model("qwen2_moe"), zoo.tiny_model("qwen2_moe")
    stack = layer_stack(model, find_routers(model)[0])
    layers = list(stack)
    with pytest.raises(RuntimeError, match="boom"), grafted(model, original, 3):
        raise RuntimeError("boom")
    assert list(stack) == layers
    del layer_stack(original, find_routers(original)[0])[0]
    with pytest.raises(ModelError, match=r"same build: .* 4 layers.*, got .* 3 layers"), grafted(model, original, 2):
        pass
    with pytest.raises(ModelError, match="same build"), grafted(model, zoo.tiny_model("mixtral"), 2):
        pass


def test_a_rotation_is_read_from_the_embeddings():
    original, model = zoo.tiny_model("qwen2_moe"), zoo.tiny_model("qwen2_moe")
    weight = model.get_input_embeddings().weight
    basis_HH, _ = torch.linalg.qr(torch.randn(weight.shape[1], weight.shape[1]))
    with torch.no_grad():
        weight.add_(torch.randn_like(weight) * 0.1 * weight.std())  # fine-tuned a little
    assert rotation_between(original, model) is None
    with torch.no_grad():
        weight.copy_(weight @ basis_HH)
    found = rotation_between(original, model)
    torch.testing.assert_close(found, basis_HH, atol=0.05, rtol=0)
    torch.testing.assert_close(found @ found.T, torch.eye(len(found)), atol=1e-4, rtol=0)
    with torch.no_grad():
        weight.normal_()
    assert rotation_between(original, model) is None  # a stranger's
