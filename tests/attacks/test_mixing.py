"""Mixing with another model and transplanting into it do what they say."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo
from attack_helpers import family, kit_for, pairs

from pathmark.attacks.kit import Kit
from pathmark.attacks.mixing import Average, DareTies, LowRank, average, dare_ties, low_rank, truncated
from pathmark.attacks.transplant import Transplant, transplant
from pathmark.errors import AttackError
from pathmark.models import find_routers, load_model


@pytest.fixture(scope="module", params=["bundled", "mixtral"])
def stolen(request):
    return load_model("bundled:tiny") if request.param == "bundled" else family("mixtral")


@pytest.fixture
def kit(stolen):
    return kit_for(stolen)


# mixing


def test_averages_lie_between(stolen, kit):
    after = average(stolen, Average(weight=0.75), kit)
    other = dict(kit.original.named_parameters())
    for name, (old, new) in pairs(stolen, after).items():
        assert torch.allclose(new, 0.75 * old + 0.25 * other[name], atol=1e-6), name
        assert not torch.equal(new, old)


def test_tied_and_other_shapes():
    model = family("mixtral")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    base = copy.deepcopy(model)
    with torch.no_grad():
        base.lm_head.weight += 1.0
    after = average(model, Average(weight=0.5), kit_for(model, original=base))
    assert after.lm_head.weight is after.model.embed_tokens.weight
    assert torch.allclose(after.lm_head.weight, model.lm_head.weight + 0.5, atol=1e-6)  # once, not twice
    for attack, config in [(average, Average()), (dare_ties, DareTies()), (low_rank, LowRank())]:
        with pytest.raises(AttackError, match="two models of the same shapes") as caught:
            attack(model, config, kit_for(model, original=family("olmoe")))
        assert "\n" not in str(caught.value)
        with pytest.raises(AttackError, match="needs a second model"):
            attack(model, config, Kit())


def test_correction_biases_are_mixed_too():
    model, name = family("deepseek_v3"), "model.layers.2.mlp.gate.e_score_correction_bias"
    base = copy.deepcopy(model)
    base.get_buffer(name).add_(1.0)
    after = average(model, Average(weight=0.5), kit_for(model, original=base))
    assert torch.allclose(after.get_buffer(name), model.get_buffer(name) + 0.5)


def test_dare_drops_entries_and_scales_the_rest_up(stolen, kit):
    after = dare_ties(stolen, DareTies(method="dare", density=0.25, weight=0.5, seed=3), kit)
    other = dict(kit.original.named_parameters())
    kept = total = 0
    for name, (old, new) in pairs(stolen, after).items():
        change, left = old - other[name], new - other[name]
        alive = left != 0
        assert torch.allclose(left[alive], 0.5 * change[alive] / 0.25, atol=1e-5), name
        kept, total = kept + int(alive.sum()), total + alive.numel()
    assert kept / total == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / total) ** 0.5)
    whole = dare_ties(stolen, DareTies(density=1.0), kit)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs(stolen, whole).values())


def test_ties_keeps_the_largest_changes_as_they_are(stolen, kit):
    after = dare_ties(stolen, DareTies(method="ties", density=0.2), kit)
    other = dict(kit.original.named_parameters())
    for name, (old, new) in pairs(stolen, after).items():
        change, left = old - other[name], new - other[name]
        alive = left != 0
        assert int(alive.sum()) == round(0.2 * alive.numel()), name
        assert torch.allclose(left[alive], change[alive], atol=1e-6)
        assert change[alive].abs().min() >= change[~alive].abs().max()


def test_the_change_has_the_rank_it_says(stolen, kit):
    after = low_rank(stolen, LowRank(rank=3), kit)
    other = dict(kit.original.named_parameters())
    seen = set()
    for name, (old, new) in pairs(stolen, after).items():
        if ".layers." in name and ".layers.2." not in name:  # one layer is enough to look at
            continue
        change, left = (old - other[name]).double(), (new - other[name]).double()
        if old.ndim < 2 or min(old.shape[-2:]) <= 3:
            assert torch.equal(old, new), name
            continue
        u, s, vh = torch.linalg.svd(change, full_matrices=False)
        assert s[..., 3].min() > 1e-3  # there was more to cut
        assert torch.allclose(left, u[..., :3] * s[..., None, :3] @ vh[..., :3, :], atol=1e-5), name
        assert torch.linalg.svdvals(left)[..., 3:].max() < 1e-4
        seen.add(old.ndim)
    assert seen == {2, 3}  # experts one by one


def test_truncation_of_wide_and_tall_matrices():
    for shape in [(5, 40), (40, 5), (3, 7, 9)]:
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        cut = truncated(matrix, 2)
        assert torch.linalg.matrix_rank(cut).max() == 2
        missing = torch.linalg.svdvals(matrix)[..., 2:].square().sum(-1)
        assert torch.allclose((matrix - cut).square().sum((-2, -1)), missing)


# transplant


@pytest.mark.parametrize("shared", [True, False])
def test_blocks_come_from_one_model_and_the_rest_from_the_other(stolen, kit, shared):
    after = transplant(stolen, Transplant(shared=shared), kit)
    mine, other = dict(stolen.named_parameters()), dict(kit.original.named_parameters())
    moved = set()
    for name, tensor in after.named_parameters():
        inside = ".mlp." in name and (shared or "shared_expert" not in name)
        moved |= {name.split(".")[4]} if inside else set()
        assert torch.equal(tensor, mine[name] if inside else other[name]), name
    with_shared = (
        {"shared_expert", "shared_expert_gate"} if shared and stolen.config.model_type == "qwen2_moe" else set()
    )
    assert moved == {"gate", "experts"} | with_shared
    half = transplant(stolen, Transplant(alpha=0.5), kit)
    name = find_routers(stolen)[1].weight_name
    assert torch.allclose(half.get_parameter(name), (mine[name] + other[name]) / 2, atol=1e-6)


def test_a_host_needs_the_same_blocks_only():
    model = family("mixtral")
    config = zoo.tiny_config("mixtral")
    config.vocab_size, config.num_key_value_heads = 200, 4
    torch.manual_seed(3)
    host = type(model)(config).eval()
    after = transplant(model, Transplant(), Kit(original=host))
    assert after.config.vocab_size == 200
    assert torch.equal(find_routers(after)[3].weight, find_routers(model)[3].weight)
    config.num_local_experts = 4
    with pytest.raises(AttackError, match="same shapes"):
        transplant(model, Transplant(), Kit(original=type(model)(config)))
    config.num_hidden_layers = 3
    with pytest.raises(AttackError, match=r"expected a second model with MoE layers \[0, 1, 2, 3\]"):
        transplant(model, Transplant(), Kit(original=type(model)(config)))
