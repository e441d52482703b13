"""One test per MoE causal-LM type of the installed transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import zoo

from pathmark.errors import ModelError
from pathmark.models import find_routers, record_routing

UNSUPPORTED = {"doge"}
IDS_BT = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
MASK_BT = torch.ones_like(IDS_BT).index_fill(1, torch.tensor([0, 1]), 0)
MASK_BT[1] = 1


def independent_logits(model_type, site, inputs_NH):
    """Router logits from the router's input and weight, by numpy and the family's own definition."""
    x_NH = inputs_NH.double()
    router = site.router
    if model_type in ("gemma4", "gemma4_text"):
        x_NH = x_NH / (x_NH.pow(2).mean(-1, keepdim=True) + router.eps).sqrt()
        x_NH = x_NH * router.scale.double() * router.hidden_size**-0.5
    weights = {name: p.detach().double() for name, p in router.named_parameters() if p.ndim == 2 and p.shape[0] >= 8}
    (weight_EH,) = [w for w in weights.values() if w.shape[1] == x_NH.shape[1]]
    logits_NE = x_NH @ weight_EH.T
    if model_type == "gpt_oss":
        logits_NE = logits_NE + router.bias.detach().double()
    if model_type == "laguna" and router.router_logit_softcapping > 0:
        cap = router.router_logit_softcapping
        logits_NE = torch.tanh(logits_NE / cap) * cap
    return logits_NE[:, :8] if model_type == "inkling_text" else logits_NE


def test_the_library_has_the_59_types_that_the_table_speaks_of():
    assert len(zoo.moe_types()) == 59


@pytest.mark.parametrize("model_type", [t for t in zoo.moe_types() if t not in UNSUPPORTED])
def test_routers_of_every_family(model_type):
    model = zoo.tiny_model(model_type)
    sites = find_routers(model)
    assert sites
    assert len({site.layer for site in sites}) == len(sites)

    received, inputs, outputs = {}, {}, {}
    handles = []
    for site in sites:
        layer = site.layer

        def on_router(module, args, kwargs, output, layer=layer):
            inputs[layer] = (args[0] if args else kwargs["hidden_states"]).detach()
            outputs[layer] = output

        handles.append(site.router.register_forward_hook(on_router, with_kwargs=True))
        if site.experts is not None:

            def on_experts(module, args, layer=layer):
                received[layer] = args

            handles.append(site.experts.register_forward_pre_hook(on_experts))
    hooked_before = count_hooks(model)
    with record_routing(model, gradients=True) as trace:
        model(input_ids=IDS_BT, attention_mask=MASK_BT)
    assert count_hooks(model) == hooked_before
    for handle in handles:
        handle.remove()

    total = 0.0
    for site in sites:
        routing = trace[site.layer]
        keep_N = MASK_BT.bool().flatten()
        assert routing.logits_BTE.shape == (2, 12, site.n_experts)
        assert routing.decision_BTK.shape == (2, 12, site.top_k)
        assert (routing.decision_BTK[0, :2] == -1).all()
        assert (routing.logits_BTE[0, :2] == 0).all()

        logits_NE = routing.logits_BTE.detach().flatten(0, 1)[keep_N].double()
        if model_type == "zaya":  # an MLP whose last layer is the weight: compare with its own output
            expected_NE = outputs[site.layer][0].detach().double()[keep_N]
        else:
            flat_NH = inputs[site.layer].reshape(-1, inputs[site.layer].shape[-1])
            expected_NE = independent_logits(model_type, site, flat_NH)[keep_N]
        torch.testing.assert_close(logits_NE, expected_NE, atol=1e-4, rtol=1e-4)

        chosen_NK = routing.decision_BTK.flatten(0, 1)[keep_N].sort(-1).values
        real_NK = what_experts_received(model_type, site, received, outputs)[keep_N].sort(-1).values
        assert torch.equal(chosen_NK, real_NK)

        probs_BTE = routing.probs_BTE
        torch.testing.assert_close(probs_BTE.sum(-1), MASK_BT.float(), atol=1e-5, rtol=0)
        # g ranks experts as the logits do ...
        assert torch.equal(probs_BTE[1].argsort(-1), routing.logits_BTE[1].argsort(-1))
        # ... and is the decision where nothing else takes part in it.
        if not site.choice_bias and not site.group_limited and site.scoring != "sparsemixer":
            top_NK = probs_BTE.flatten(0, 1)[keep_N].topk(site.top_k).indices.sort(-1).values
            assert torch.equal(top_NK, chosen_NK)
        total = total + routing.probs_BTE.pow(2).sum()

    total.backward()
    for site in sites:
        gradient = site.projection.weight.grad
        assert gradient is not None
        assert gradient.abs().sum() > 0


def what_experts_received(model_type, site, received, outputs):
    if model_type in ("llama4", "llama4_text"):
        scores_NE = outputs[site.layer][0]
        return scores_NE.gt(0).nonzero()[:, 1].reshape(len(scores_NE), -1)
    if model_type == "jetmoe":
        _, tokens, _, sizes, logits_NE = outputs[site.layer]
        experts = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        chosen_NE = torch.zeros_like(logits_NE).index_put((tokens, experts), torch.tensor(1.0), accumulate=True)
        return chosen_NE.nonzero()[:, 1].reshape(len(logits_NE), -1)
    _, index_NK, weight_NK = received[site.layer]
    return index_NK.masked_fill(weight_NK == 0, site.n_experts - 1) if model_type == "zaya" else index_NK


def count_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("model_type", sorted(UNSUPPORTED))
def test_families_that_cannot_be_marked_say_why(model_type):
    with pytest.raises(ModelError, match="product keys"):
        find_routers(zoo.tiny_model(model_type))


SCALES_TOKENS_OR_MIXES = {"doge", "jetmoe", "llama4", "llama4_text", "phimoe"}


@pytest.mark.parametrize("model_type", [t for t in zoo.moe_types() if t not in SCALES_TOKENS_OR_MIXES])
def test_g_is_proportional_to_the_weights_that_the_experts_get(model_type):
    model = zoo.tiny_model(model_type)
    site = find_routers(model)[-1]
    kept = {}
    handle = site.experts.register_forward_pre_hook(lambda m, args: kept.update(index=args[1], weight=args[2]))
    with torch.no_grad(), record_routing(model) as trace:
        model(input_ids=IDS_BT)
    handle.remove()
    if model_type == "zaya":  # one expert per token: the weight is g itself
        chosen_N = trace[site.layer].decision_BTK.flatten()
        g_N = trace[site.layer].probs_BTE.flatten(0, 1).gather(-1, chosen_N.unsqueeze(-1)).squeeze(-1)
        real_N = kept["weight"].squeeze(-1) > 0
        torch.testing.assert_close(g_N[real_N], kept["weight"].squeeze(-1)[real_N], atol=1e-5, rtol=1e-4)
        return
    g_NK = trace[site.layer].probs_BTE.flatten(0, 1).gather(-1, kept["index"])
    expected_NK = F.normalize(kept["weight"].float(), p=1, dim=-1)
    torch.testing.assert_close(F.normalize(g_NK, p=1, dim=-1), expected_NK, atol=1e-4, rtol=0)
