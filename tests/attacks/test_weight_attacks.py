"""Attacks that need no training really did what they say, and left the rest as it was, bit for bit."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import zoo
from attack_helpers import Count, family, kit_for, logits, pairs, routing, sibling

from pathmark.attacks.blocks import moe_blocks
from pathmark.attacks.kit import Kit
from pathmark.attacks.mixing import Average, DareTies, LowRank, average, dare_ties, low_rank
from pathmark.attacks.noise import RouterNoise, WeightNoise, router_noise, weight_noise
from pathmark.attacks.saliency import (
    MergeSimilar,
    Reap,
    RemoveLeastUsed,
    expert_saliency,
    expert_use,
    mask_least_used,
    merge_similar,
    reap_prune,
    remove_least_used,
)
from pathmark.attacks.surgery import ChangeTopK, DropLayers, change_top_k, drop_chosen_layers, layer_angles
from pathmark.attacks.transplant import Transplant, transplant
from pathmark.errors import AttackError, ModelError
from pathmark.models import expert_usage, find_routers, load_model

SMALL = {"samples": 12, "length": 24}
ATTACKS = [
    (weight_noise, WeightNoise()),
    (router_noise, RouterNoise()),
    (reap_prune, Reap(**SMALL)),
    (remove_least_used, RemoveLeastUsed(**SMALL)),
    (mask_least_used, RemoveLeastUsed(**SMALL)),
    (merge_similar, MergeSimilar(**SMALL)),
    (change_top_k, ChangeTopK(top_k=3)),
    (drop_chosen_layers, DropLayers(**SMALL)),
    (average, Average()),
    (dare_ties, DareTies()),
    (low_rank, LowRank()),
    (transplant, Transplant()),
]
LASTING = [(attack, config) for attack, config in ATTACKS if attack not in (router_noise, mask_least_used)]


@pytest.fixture(scope="module", params=["bundled", "mixtral"])
def stolen(request):
    return load_model("bundled:tiny") if request.param == "bundled" else family("mixtral")


@pytest.fixture
def kit(stolen):
    return kit_for(stolen)


@pytest.mark.parametrize(("attack", "config"), ATTACKS, ids=lambda x: getattr(x, "__name__", ""))
def test_the_given_models_stay_and_progress_comes_to_its_end(stolen, attack, config):
    base, bar = sibling(stolen), Count()
    kit = kit_for(stolen, original=base, progress=bar)
    before = [{n: t.clone() for n, t in model.state_dict().items()} for model in (stolen, base)]
    quiet, settings = logits(stolen), stolen.config.to_dict()
    after = attack(stolen, config, kit)
    assert (logits(after) - quiet).abs().max() > 1e-4
    assert torch.equal(logits(stolen), quiet)  # no hook is left behind either
    assert stolen.config.to_dict() == settings
    for model, tensors in zip((stolen, base), before, strict=True):
        assert all(torch.equal(t, tensors[n]) for n, t in model.state_dict().items())
    assert bar.stages
    assert all(total == done > 0 for _, total, done in bar.stages)


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize(("attack", "config"), LASTING, ids=lambda x: getattr(x, "__name__", ""))
def test_every_family_survives_a_save_and_a_load(name, attack, config, tmp_path):
    model = family(name)
    after = attack(model, config, kit_for(model))
    after.save_pretrained(tmp_path)
    assert (logits(load_model(tmp_path)) - logits(after)).abs().max() < 1e-5


@pytest.mark.parametrize(("attack", "config"), ATTACKS, ids=lambda x: getattr(x, "__name__", ""))
def test_another_layout_is_refused_in_one_line(attack, config):
    model = zoo.tiny_model("gpt_oss")
    with pytest.raises(ModelError, match="expected experts as fused") as caught:
        attack(model, config, kit_for(model))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("attack", "config"), ATTACKS[2:5], ids=lambda x: getattr(x, "__name__", ""))
def test_groups_of_experts_are_refused_before_any_work(attack, config):
    model, bar = zoo.tiny_model("deepseek_v3"), Count()
    with pytest.raises(ModelError, match="groups of experts"):
        attack(model, config, kit_for(model, progress=bar))
    assert not bar.stages


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (WeightNoise, {"scale": 0.0}),
        (RouterNoise, {"sigma": -1.0}),
        (Reap, {"share": 1.0}),
        (RemoveLeastUsed, {"samples": 0}),
        (MergeSimilar, {"length": 3}),
        (ChangeTopK, {"top_k": 0}),
        (DropLayers, {"count": 0}),
        (DropLayers, {"where": "early"}),
        (Average, {"weight": 1.0}),
        (DareTies, {"density": 0.0}),
        (DareTies, {"method": "slerp"}),
        (DareTies, {"weight": 0.0}),
        (LowRank, {"rank": 0}),
        (Transplant, {"alpha": 0.0}),
    ],
)
def test_settings_out_of_range_are_refused(kind, settings):
    with pytest.raises(ValueError, match="must be"):
        kind(**settings)


# noise


def test_weight_noise_has_the_size_it_says_and_spares_vectors(stolen, kit):
    after = weight_noise(stolen, WeightNoise(scale=0.2, seed=4), kit)
    for name, (old, new) in pairs(stolen, after).items():
        if old.ndim < 2:
            assert torch.equal(old, new), name
            continue
        matrices = zip(old.flatten(0, -3), new.flatten(0, -3), strict=True) if old.ndim == 3 else [(old, new)]
        for old_matrix, new_matrix in matrices:
            ratio = float(((new_matrix - old_matrix).std() / old_matrix.std()).detach())
            assert ratio == pytest.approx(0.2, abs=5 * 0.2 / (2 * old_matrix.numel()) ** 0.5), name
    again = weight_noise(stolen, WeightNoise(scale=0.2, seed=4), kit)
    assert all(torch.equal(a, b) for a, b in pairs(after, again).values())


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3", "afmoe", "gemma4_text", "inkling_text"])
def test_recorded_logits_move_by_exactly_the_noise(name):
    model = family(name)
    layer = find_routers(model)[1].layer
    after = router_noise(model, RouterNoise(sigma=1.5, seed=2), kit_for(model, layers=[layer]))
    old, new = routing(model), routing(after)
    eps_NE = 1.5 * torch.randn(120, 8, generator=torch.Generator().manual_seed(2 * 100_003 + layer))
    moved_BTE = new[layer].logits_BTE - old[layer].logits_BTE
    assert torch.allclose(moved_BTE.reshape(120, 8), eps_NE, atol=1e-4)
    below = find_routers(model)[0].layer
    assert torch.equal(new[below].logits_BTE, old[below].logits_BTE)  # only the layer that was named


def test_router_noise_is_fresh_seeded_and_decides(stolen, kit):
    after = router_noise(stolen, RouterNoise(sigma=2.0, seed=1), kit)
    first, second = routing(after), routing(after)
    again = routing(router_noise(stolen, RouterNoise(sigma=2.0, seed=1), kit))
    quiet = routing(stolen)
    layer = find_routers(stolen)[0].layer  # below it nothing differs, so the difference is the noise
    noise_BTE = first[layer].logits_BTE - quiet[layer].logits_BTE
    assert float(noise_BTE.std()) == pytest.approx(2.0, rel=5 / (2 * noise_BTE.numel()) ** 0.5)
    assert float(noise_BTE.mean()) == pytest.approx(0.0, abs=5 * 2.0 / noise_BTE.numel() ** 0.5)
    assert not torch.allclose(first[layer].logits_BTE, second[layer].logits_BTE, atol=0.1)
    for site in find_routers(stolen):
        assert torch.equal(first[site.layer].logits_BTE, again[site.layer].logits_BTE)
        chosen = first[site.layer].logits_BTE.topk(site.top_k).indices.sort().values
        assert torch.equal(chosen, first[site.layer].decision_BTK.sort().values)
    assert all(torch.equal(a, b) for a, b in pairs(stolen, after).values())


def test_masked_experts_are_never_chosen_and_the_others_as_before(stolen, kit):
    sites = find_routers(stolen)
    layer, config = sites[-1].layer, RemoveLeastUsed(share=0.5, **SMALL)
    use_E = expert_use(stolen, config, kit)[layer]
    masked = set(use_E.argsort(stable=True)[: len(use_E) // 2].tolist())
    known = kit_for(stolen, layers=[layer])
    before, after = routing(stolen), routing(mask_least_used(stolen, config, known))
    for site in sites[:-1]:
        assert torch.equal(after[site.layer].decision_BTK, before[site.layer].decision_BTK)
    was, now, mask_BT = before[layer].decision_BTK, after[layer].decision_BTK, after[layer].mask_BT
    assert not set(now[mask_BT].flatten().tolist()) & masked
    # tokens that chose none of them choose what they chose before
    kept_BT = mask_BT & ~torch.isin(was, torch.tensor(sorted(masked))).any(-1)
    assert torch.equal(was[kept_BT].sort(-1).values, now[kept_BT].sort(-1).values)


def test_router_noise_leaves_the_experts_input_alone():
    model = family("qwen2_moe")
    seen = []
    for tested in (model, router_noise(model, RouterNoise(), kit_for(model))):
        handle = find_routers(tested)[0].experts.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        logits(tested)
        handle.remove()
    assert torch.equal(seen[0], seen[1])


def test_router_noise_lives_in_hooks_only(tmp_path):
    model = family("mixtral")
    after = router_noise(model, RouterNoise(), kit_for(model))
    with pytest.raises(AttackError, match="can't be saved"):
        after.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    twin = copy.deepcopy(after)  # its own noise, from the same place in the stream
    assert torch.equal(logits(twin), logits(after))
    with torch.no_grad():
        find_routers(model)[2].weight[3] = find_routers(model)[2].weight[5]
    with pytest.raises(AttackError, match="layer 2: expected 8 independent router rows of 32 entries, got rank 7"):
        router_noise(model, RouterNoise(), kit_for(model))


# saliency


def keep_arguments(seen, layer, module, args):
    seen[layer] = args


def by_hand(model, kit, config):
    """REAP's score, expert by expert, one text at a time."""
    totals = {site.layer: torch.zeros(site.n_experts) for site in find_routers(model)}
    visits = {site.layer: torch.zeros(site.n_experts) for site in find_routers(model)}
    for row in kit.rows(config.samples, config.length, seed=config.seed):
        seen = {}
        handles = [
            site.experts.register_forward_pre_hook(partial(keep_arguments, seen, site.layer))
            for site in find_routers(model)
        ]
        with torch.no_grad():
            model(input_ids=torch.tensor([row]))
        for handle in handles:
            handle.remove()
        for site in find_routers(model):
            for x, chosen, gates in zip(*seen[site.layer], strict=True):
                for e, gate in zip(chosen.tolist(), gates, strict=True):
                    first, up = (site.experts.gate_up_proj[e] @ x).chunk(2)
                    output = site.experts.down_proj[e] @ (torch.nn.functional.silu(first) * up)
                    totals[site.layer][e] += (gate * output.norm()).detach()
                    visits[site.layer][e] += 1
    return {n: total / visits[n].clamp_min(1) for n, total in totals.items()}, visits


@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
def test_reap_scores_as_defined_and_the_lowest_go(name):
    model, config = family(name), Reap(share=0.5, samples=6, length=20)
    kit = kit_for(model)
    expected, _ = by_hand(model, kit, config)
    got = expert_saliency(model, config, kit)
    after = reap_prune(model, config, kit)
    for old, new in zip(moe_blocks(model), moe_blocks(after), strict=True):
        score = expected[old.site.layer]
        assert torch.allclose(got[old.site.layer].float(), score, rtol=1e-4)
        keep = score.argsort()[4:].sort().values
        assert torch.equal(new.site.weight, old.site.weight[keep])
        assert torch.equal(new.down_EHI, old.down_EHI[keep])
    assert after.config.num_local_experts == 4 if name == "mixtral" else after.config.num_experts == 4


def test_padding_does_not_count():
    model, config = family("mixtral"), Reap(samples=20, length=50)
    kit = kit_for(model)
    assert len({len(row) for row in kit.rows(20, 50)}) > 3
    expected, _ = by_hand(model, kit, config)
    got = expert_saliency(model, config, kit)
    assert all(torch.allclose(got[n].float(), expected[n], rtol=1e-3) for n in expected)


def test_an_expert_that_nobody_chose_goes_first():
    model = family("mixtral")
    with torch.no_grad():
        for block in moe_blocks(model):
            block.site.weight[5] = 0.0
            block.down_EHI[5] *= 100  # loud, if it were ever asked
    config = Reap(share=0.125, samples=4, length=8)
    _, visits = by_hand(model, kit_for(model), config)
    unseen = [n for n, seen in visits.items() if seen[5] == 0 and (seen == 0).sum() == 1]
    assert unseen
    after = reap_prune(model, config, kit_for(model))
    for n in unseen:
        keep = [e for e in range(8) if e != 5]
        assert torch.equal(find_routers(after)[n].weight, find_routers(model)[n].weight[keep])


def test_the_least_used_go(stolen, kit):
    config = RemoveLeastUsed(share=0.5, samples=40, length=10_000 if stolen.config.vocab_size == 128 else 64)
    layers = [site.layer for site in find_routers(stolen)]
    usage = expert_usage(stolen, kit.tokenizer, kit.texts, layers, max_tokens=config.length)
    after = remove_least_used(stolen, config, kit)
    for old, new in zip(moe_blocks(stolen), moe_blocks(after), strict=True):
        count = old.site.n_experts
        assert new.site.n_experts == count // 2
        used = torch.tensor(usage[old.site.layer])
        kept = {e for e in range(count) if (new.site.weight == old.site.weight[e]).all(1).any()}
        assert len(kept) == count // 2
        gone = sorted(set(range(count)) - kept)
        assert used[gone].max() <= used[sorted(kept)].min() + 1e-9


def test_merged_experts_are_weighted_by_their_use():
    model = family("mixtral")
    with torch.no_grad():
        for block in moe_blocks(model):  # 2 and 6 are the most similar rows by far, and unequally used
            block.site.weight[6] = block.site.weight[2] * 0.6
    kit, config = kit_for(model), MergeSimilar(share=0.25, samples=40, length=10_000)
    usage = expert_usage(model, kit.tokenizer, kit.texts, range(4), max_tokens=10_000)
    after = merge_similar(model, config, kit)
    uneven = 0
    for old, new in zip(moe_blocks(model), moe_blocks(after), strict=True):
        used = usage[old.site.layer]
        weight = (used[2] + 1e-6) / (used[2] + used[6] + 2e-6)
        uneven += abs(weight - 0.5) > 0.05
        assert new.site.n_experts == 7
        assert torch.allclose(new.down_EHI[2], weight * old.down_EHI[2] + (1 - weight) * old.down_EHI[6], atol=1e-5)
    assert uneven


def test_text_is_asked_for():
    model = family("mixtral")
    for attack, config in [*ATTACKS[2:5], (drop_chosen_layers, DropLayers())]:
        with pytest.raises(AttackError, match="ordinary text"):
            attack(model, config, Kit())
    with pytest.raises(AttackError, match="expected 128 texts"):
        reap_prune(model, Reap(), kit_for(model))


# top-k and layers


def test_another_number_of_experts_is_chosen(stolen, kit):
    for k in (1, 3):
        after = change_top_k(stolen, ChangeTopK(top_k=k), kit)
        trace = routing(after)
        assert {trace[site.layer].decision_BTK.shape[-1] for site in find_routers(after)} == {k}
        assert after.config.num_experts_per_tok == k
        assert all(torch.equal(a, b) for a, b in pairs(stolen, after).values())
    now = find_routers(stolen)[0].top_k
    with pytest.raises(AttackError, match=f"already chooses {now}"):
        change_top_k(stolen, ChangeTopK(top_k=now), kit)
    with pytest.raises(AttackError, match="experts, got top_k 99"):
        change_top_k(stolen, ChangeTopK(top_k=99), kit)
    with pytest.raises(ModelError, match="got sparsemixer"):
        change_top_k(family("phimoe"), ChangeTopK(top_k=1), kit)
    with pytest.raises(ModelError, match="num_experts_per_tok"):
        change_top_k(family("gemma4_text"), ChangeTopK(top_k=1), kit)


def test_layers_that_do_least_are_dropped(stolen, kit):
    model = copy.deepcopy(stolen)
    with torch.no_grad():
        for n in (1, 3):  # they hand the hidden state on, almost
            layer = model.model.layers[n]
            layer.self_attn.o_proj.weight *= 1e-3
            for name, parameter in layer.mlp.named_parameters():
                if "down_proj" in name:
                    parameter *= 1e-3
    after = drop_chosen_layers(model, DropLayers(count=2, samples=8, length=20), kit)
    kept = [n for n in range(len(model.model.layers)) if n not in (1, 3)]
    old, new = find_routers(model), find_routers(after)
    assert all(torch.equal(new[i].weight, old[n].weight) for i, n in enumerate(kept))
    assert after.config.num_hidden_layers == len(kept)


def test_angles_are_those_between_what_enters_and_leaves(stolen, kit):
    rows = kit.rows(5, 30)
    total, tokens = torch.zeros(len(stolen.model.layers) - 1), 0
    for row in rows:
        with torch.no_grad():
            states = stolen(input_ids=torch.tensor([row]), output_hidden_states=True).hidden_states
        for n in range(len(total)):  # the last one comes back normed
            cosine = torch.nn.functional.cosine_similarity(states[n], states[n + 1], dim=-1)
            total[n] += (cosine.arccos() / torch.pi).sum()
        tokens += len(row)
    got = layer_angles(stolen, stolen.model.layers, rows, kit)
    assert torch.allclose(got[:-1].float(), total / tokens, rtol=1e-3)
    assert 0 < got.min() < got.max() < 1


def test_late_layers_go_but_not_the_last():
    model = family("olmoe")
    after = drop_chosen_layers(model, DropLayers(count=2, where="late"), Kit())  # needs no text
    kept = [find_routers(model)[n].weight for n in (0, 3)]
    assert all(torch.equal(site.weight, old) for site, old in zip(find_routers(after), kept, strict=True))
    with pytest.raises(AttackError, match="fewer than the model's 4 layers"):
        drop_chosen_layers(model, DropLayers(count=4, where="late"), Kit())
