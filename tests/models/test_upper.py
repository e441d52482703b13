"""Running the upper layers from cached hidden states gives what the whole model gives."""

from __future__ import annotations

import pytest
import torch
import zoo

from pathmark.models import find_routers
from pathmark.models.upper import body, can_run_from, hidden_at_layer, layer_stack, without_layers_below

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
        with without_layers_below(model, stack, 2):
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
    with pytest.raises(RuntimeError, match="boom"), without_layers_below(model, stack, 3):
        raise RuntimeError("boom")
    assert list(stack) == layers
    assert [name for name, _ in model.named_parameters()] == names


def test_families_that_pass_more_than_hidden_states_take_the_long_way():
    model = zoo.tiny_model("zaya")  # its routers hand their own state from layer to layer
    stack = layer_stack(model, find_routers(model)[0])
    assert not can_run_from(model, stack, 2, IDS_BT, MASK_BT)
