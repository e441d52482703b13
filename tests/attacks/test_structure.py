"""Changes that must keep the outputs keep them, really change the weights, and survive a save and a load."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zoo
from attack_helpers import logits
from torch.utils._python_dispatch import TorchDispatchMode

from pathmark.attacks.structure import (
    PermuteExperts,
    expert_order,
    permute_experts,
    permute_neurons,
    rescale_neurons,
    rotate_residual,
    shift_routers,
)
from pathmark.attacks.surgery import (
    DuplicateExperts,
    MergeExperts,
    RemoveExperts,
    drop_layers,
    duplicate_experts,
    merge_experts,
    part_of,
    remove_experts,
    similar_pairs,
)
from pathmark.errors import ModelError
from pathmark.models import find_routers, load_model, record_routing

PRESERVING = [permute_experts, shift_routers, permute_neurons, rescale_neurons, rotate_residual]
LOSSY = {
    "remove": lambda m: remove_experts(m, RemoveExperts(share=0.25), usage=uniform_usage(m)),
    "merge": lambda m: merge_experts(m, MergeExperts(share=0.5)),
    "duplicate": lambda m: duplicate_experts(m, DuplicateExperts(count=2)),
    "drop": lambda m: drop_layers(m, [1]),
}
FAMILIES = ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe"]


def family(name):
    """A random model with lively routers, norms and biases, so that nothing is folded by luck."""
    model = zoo.tiny_model(name)
    with torch.no_grad():
        for site in find_routers(model):
            site.weight.normal_(std=0.5)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def uniform_usage(model):
    """Use that rises with the index: the first experts are the least used."""
    return {site.layer: np.arange(site.n_experts, dtype=float) for site in find_routers(model)}


def changed(before, after):
    """Names of tensors whose values differ."""
    new = dict(after.named_parameters())
    return {n for n, p in before.named_parameters() if n not in new or not torch.equal(p, new[n])}


def reloaded(model, folder):
    model.save_pretrained(folder)
    return load_model(folder)


@pytest.mark.parametrize("attack", PRESERVING)
def test_outputs_of_the_bundled_model_stay(bundled, attack):
    before = {n: p.clone() for n, p in bundled.named_parameters()}
    after = attack(bundled)
    assert (logits(after) - logits(bundled)).abs().max() < 1e-3
    assert changed(bundled, after)
    assert all(torch.equal(p, before[n]) for n, p in bundled.named_parameters())  # the given model is untouched


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("attack", PRESERVING)
def test_outputs_of_the_families_stay_also_on_disk(name, attack, tmp_path):
    model = family(name)
    after = attack(model)
    assert (logits(after) - logits(model)).abs().max() < 1e-3
    again = reloaded(after, tmp_path)
    assert (logits(again) - logits(after)).abs().max() < 1e-5


def test_all_together(bundled):
    after = bundled
    for attack in PRESERVING:
        after = attack(after)
    assert (logits(after) - logits(bundled)).abs().max() < 1e-3
    routers = {site.weight_name for site in find_routers(bundled)}
    experts = {n for n, p in bundled.named_parameters() if ".experts." in n}
    assert routers | experts <= changed(bundled, after)


def test_a_permutation_moves_every_index_as_it_says(bundled):
    after = permute_experts(bundled, PermuteExperts(seed=5))
    ids_BT = torch.arange(100, 164).reshape(2, 32)
    traces = []
    for model in (bundled, after):
        with record_routing(model) as trace, torch.no_grad():
            model(input_ids=ids_BT)
        traces.append(trace)
    for site in find_routers(bundled):
        order = expert_order(5, site.layer, site.n_experts)
        assert not torch.equal(order, torch.arange(site.n_experts))
        old, new = (trace[site.layer].probs_BTE for trace in traces)
        assert torch.allclose(new, old[..., order], atol=1e-5)


def test_neurons_really_move_and_scale(bundled):
    name = "model.layers.3.mlp.experts.down_proj"
    old = bundled.get_parameter(name)[7]
    moved = permute_neurons(bundled).get_parameter(name)[7]
    assert not torch.equal(old, moved)
    assert torch.allclose(old.norm(dim=0).sort().values, moved.norm(dim=0).sort().values)
    scaled = rescale_neurons(bundled).get_parameter(name)[7]
    ratio = scaled / old
    assert torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-3)
    assert ratio[0].abs().max() > 1.5
    assert (ratio[0] < 0).any()
    assert name in changed(bundled, rescale_neurons(bundled))
    sharing = family("qwen2_moe")
    shared = "model.layers.1.mlp.shared_expert.up_proj.weight"
    assert shared in changed(sharing, rescale_neurons(sharing))


def test_rotation_folds_norms_and_unties(tmp_path):
    model = zoo.tiny_model("mixtral")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    with torch.no_grad():
        model.model.norm.weight.mul_(torch.linspace(0.5, 2, 32))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    after = rotate_residual(model)
    assert (logits(after) - logits(model)).abs().max() < 1e-3
    assert torch.equal(after.model.norm.weight, torch.ones(32))
    assert (logits(reloaded(after, tmp_path)) - logits(after)).abs().max() < 1e-5
    assert model.lm_head.weight is model.model.embed_tokens.weight  # the given model is still tied


class OneDevice(TorchDispatchMode):
    """Refuses what CUDA refuses: to compute with tensors of two devices. Meta devices let it pass."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        devices = {arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.ndim}
        assert len(devices) < 2 or "copy" in str(func), f"{func} of tensors on {devices}"
        return func(*args, **(kwargs or {}))


def test_the_rotation_goes_to_the_device_of_the_weights():
    model = zoo.tiny_model("mixtral").to("meta")
    with OneDevice():
        assert next(rotate_residual(model).parameters()).is_meta


def test_correction_biases_and_groups_move_along():
    model = zoo.tiny_model("deepseek_v3")
    after = permute_experts(model)
    assert (logits(after) - logits(model)).abs().max() < 1e-3
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    assert not torch.equal(model.get_buffer(name), after.get_buffer(name))
    order = expert_order(0, 2, 8, groups=2)
    assert {e // 4 for e in order[:4].tolist()} in ({0}, {1})  # groups stay together


@pytest.mark.parametrize(
    ("attack", "name", "message"),
    [
        (shift_routers, "deepseek_v3", "sigmoid"),
        (rotate_residual, "deepseek_v3", "expected mixtral"),
        (permute_experts, "gpt_oss", "expected experts as fused"),
        (merge_experts, "deepseek_v3", "groups of experts"),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(attack, name, message):
    with pytest.raises(ModelError, match=message) as caught:
        attack(zoo.tiny_model(name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", LOSSY)
def test_surgery_survives_a_save_and_a_load(name, kind, tmp_path):
    model = family(name)
    after = LOSSY[kind](model)
    assert (logits(after) - logits(model)).abs().max() > 1e-3
    again = reloaded(after, tmp_path)
    assert (logits(again) - logits(after)).abs().max() < 1e-5
    expected = {"remove": 6, "merge": 6, "duplicate": 10, "drop": 8}[kind]
    assert {site.n_experts for site in find_routers(again)} == {expected}


def test_a_share_of_one_is_one():
    assert [part_of(1 / n, n) for n in range(1, 400)] == [1] * 399
    assert (part_of(0.57, 100), part_of(0.3, 64), part_of(0.999, 1000), part_of(0.09, 10)) == (57, 19, 999, 0)


def test_the_least_used_experts_go_and_the_rest_keeps_its_order():
    model = family("qwen2_moe")
    usage = {site.layer: np.array([5, 0, 7, 1, 9, 3, 4, 8]) for site in find_routers(model)}
    after = remove_experts(model, RemoveExperts(share=0.4), usage=usage)  # 3 of 8
    for old, new in zip(find_routers(model), find_routers(after), strict=True):
        assert torch.equal(new.weight, old.weight[[0, 2, 4, 6, 7]])
    named = remove_experts(model, RemoveExperts(experts={n: [n, 7] for n in range(4)}))
    assert torch.equal(find_routers(named)[2].weight, find_routers(model)[2].weight[[0, 1, 3, 4, 5, 6]])
    with pytest.raises(ModelError, match="one number of experts"):
        remove_experts(model, RemoveExperts(experts={0: [1]}))
    with pytest.raises(ModelError, match="remove fewer"):
        remove_experts(model, RemoveExperts(share=0.9), usage=usage)
    with pytest.raises(ModelError, match="pass usage"):
        remove_experts(model, RemoveExperts(share=0.5))


def test_merged_pairs_are_averages():
    model = family("mixtral")
    after = merge_experts(model, MergeExperts(share=0.25))  # one pair of 8
    for old, new in zip(find_routers(model), find_routers(after), strict=True):
        ((first, second),) = similar_pairs(old.weight, 1)
        assert torch.allclose(new.weight[first], (old.weight[first] + old.weight[second]) / 2)
        old_down, new_down = old.experts.down_proj, new.experts.down_proj
        assert torch.allclose(new_down[first], (old_down[first] + old_down[second]) / 2)
        assert len(new.weight) == 7


def test_a_doubled_expert_is_chosen_together_with_its_copy(bundled):
    after = duplicate_experts(bundled, DuplicateExperts(count=4, seed=3))
    with record_routing(after, [6]) as trace, torch.no_grad():
        after(input_ids=torch.arange(100, 164).reshape(2, 32))
    rows_EH = find_routers(after)[6].weight
    for copy in range(64, 68):
        twin = int((rows_EH[:64] == rows_EH[copy]).all(1).nonzero())
        probs_BTE = trace[6].probs_BTE
        assert torch.allclose(probs_BTE[..., copy], probs_BTE[..., twin])


def test_dropped_layers_close_up(bundled, tmp_path):
    after = drop_layers(bundled, [2, 5])
    assert after.config.num_hidden_layers == 6
    old, new = find_routers(bundled), find_routers(after)
    assert [site.layer for site in new] == list(range(6))
    kept = [n for n in range(8) if n not in (2, 5)]
    assert all(torch.equal(new[i].weight, old[n].weight) for i, n in enumerate(kept))
    assert [layer.self_attn.layer_idx for layer in after.model.layers] == list(range(6))
    assert (logits(reloaded(after, tmp_path)) - logits(after)).abs().max() < 1e-3
    with pytest.raises(ModelError, match="some but not all"):
        drop_layers(bundled, [8])


def test_dense_layers_stay_dense_when_layers_are_dropped(tmp_path):
    config = zoo.tiny_config("qwen3_moe")
    config.mlp_only_layers = [1]
    torch.manual_seed(0)
    model = type(zoo.tiny_model("qwen3_moe"))(config).eval()
    after = drop_layers(model, [0])
    assert after.config.mlp_only_layers == [0]
    assert (logits(reloaded(after, tmp_path)) - logits(after)).abs().max() < 1e-5
