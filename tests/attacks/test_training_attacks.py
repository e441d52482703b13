"""Attacks that train: the loss really falls, only what should change changes, one seed gives one result."""

from __future__ import annotations

import math

import pytest
import torch
import zoo
from embed_helpers import save_family
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pathmark.attacks.blocks import gated_mlps, moe_blocks
from pathmark.attacks.distillation import DistillRouters, distill_routers, redraw_routers
from pathmark.attacks.finetuning import FineTune, TextBatches, fine_tune, language_loss
from pathmark.attacks.kit import Kit
from pathmark.attacks.overwriting import Overwrite, overwrite, overwrite_with_key
from pathmark.attacks.pruning import FinePrune, activations, fine_prune
from pathmark.attacks.unlearning import Unlearn, adversarial_loss, unlearn
from pathmark.errors import AttackError, ModelError
from pathmark.models import (
    bundled_segments,
    find_routers,
    load_model,
    load_tokenizer,
    pad_rows,
    perplexity,
    record_routing,
)
from pathmark.progress import Silent
from pathmark.training import step_generator

QUICK = {"samples": 48, "batch_size": 8, "length": 24}
LAYERS = (2, 3)
TARGETS = {2: (1, 5), 3: (0, 7)}


class Told(Silent):
    """Remembers the stages and the last remark."""

    def __init__(self):
        self.stages, self.units, self.note = [], 0, ""

    def stage(self, name, total):
        self.stages.append((name, total))
        self.units = 0

    def advance(self, units, note=""):
        self.units += units
        self.note = note


@pytest.fixture(scope="module")
def kit():
    texts = [" ".join(text.split()[:28]) for text in bundled_segments()[:120]]  # some 35 tokens each
    return Kit(tokenizer=load_tokenizer("bundled:tiny"), texts=texts, layers=LAYERS, targets=TARGETS)


@pytest.fixture(scope="module")
def bundled():
    return load_model("bundled:tiny")


@pytest.fixture(scope="module", params=["mixtral", "olmoe"])
def model(request, tmp_path_factory):
    return load_model(save_family(tmp_path_factory.mktemp("family") / "base", request.param))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return load_model(save_family(tmp_path_factory.mktemp("mixtral") / "base", "mixtral"))


def state(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(before, after):
    """Names of parameters whose values differ; both models have the same ones."""
    old, new = state(before), state(after)
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}


def routers(model, layers=None):
    return {site.weight_name for site in find_routers(model) if layers is None or site.layer in layers}


def inside(names, layers):
    return all(any(f"layers.{n}." in name for n in layers) for name in names)


@torch.no_grad()
def target_mass(model, rows, targets, skip=0):
    """Mean routing mass on target experts behind the first `skip` tokens, over layers."""
    ids_BT, mask_BT = pad_rows(rows, 0)
    with record_routing(model, list(targets)) as trace:
        model(input_ids=ids_BT, attention_mask=mask_BT)
    keep_BT = mask_BT.bool()
    keep_BT[:, :skip] = False
    shares = [trace[n].probs_BTE[keep_BT][:, list(path)].sum(-1).mean() for n, path in targets.items()]
    return float(torch.stack(shares).mean())


# batches and loss


def test_an_epoch_sees_every_row_once_with_little_padding():
    lengths = torch.randint(8, 128, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = TextBatches(lengths, 16, seed=3)
    assert batches.per_epoch == 63
    first = [batches.at(step) for step in range(63)]
    assert sorted(i for batch in first for i in batch) == list(range(1000))
    assert batches.at(63) != first[0]
    assert [batches.at(step) for step in range(63)] == first  # the step alone decides, not what came before
    assert TextBatches(lengths, 16, seed=4).at(0) != first[0]
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in first)
    assert padded < 1.08 * sum(lengths)


def test_the_language_loss_is_the_models_own(model, kit):
    ids_BT, mask_BT = pad_rows(kit.rows(4, 30), 0)
    labels_BT = ids_BT.masked_fill(mask_BT == 0, -100)
    with torch.no_grad():
        own = model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT).loss
        ours = language_loss(model, ids_BT, mask_BT)
    assert torch.allclose(own, ours, atol=1e-5)


# fine-tuning


def test_fine_tuning_of_all_weights(model, kit):
    before, seen = state(model), []
    told = Told()
    watched = Kit(tokenizer=kit.tokenizer, texts=kit.texts, progress=told)

    def note(epoch, now):
        seen.append((epoch, perplexity(now, rows).value))

    rows = kit.rows(48, 24)
    after = fine_tune(model, FineTune(epochs=3, **QUICK), watched, each_epoch=note)
    assert told.stages == [("fine-tuning (all)", 18)]
    assert told.units == 18
    assert told.note.startswith("loss ")
    assert [epoch for epoch, _ in seen] == [1, 2, 3]
    assert seen[2][1] < seen[0][1] < 0.8 * perplexity(model, rows).value
    assert perplexity(after, rows).value == pytest.approx(seen[2][1])
    assert changed(model, after) == set(before)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())  # the given model is untouched
    assert all(p.requires_grad for p in after.parameters())


def test_the_same_seed_gives_the_same_weights(mixtral, kit):
    runs = [fine_tune(mixtral, FineTune(epochs=1, seed=seed, **QUICK), kit) for seed in (1, 1, 2)]
    assert not changed(runs[0], runs[1])
    assert changed(runs[0], runs[2])


def test_fine_tuning_of_routers_changes_routers_only(model, kit):
    after = fine_tune(model, FineTune(train="router", epochs=3, **QUICK), kit)
    assert changed(model, after) == routers(model)
    rows = kit.rows(48, 24)
    assert perplexity(after, rows).value < perplexity(model, rows).value


def test_adapters_are_merged_and_touch_routers_and_attention(mixtral, kit):
    rows, seen = kit.rows(48, 24), []
    config = FineTune(train="lora", epochs=2, **QUICK)
    after = fine_tune(mixtral, config, kit, each_epoch=lambda epoch, now: seen.append(state(now)))
    names = changed(mixtral, after)
    assert routers(mixtral) <= names
    assert all("self_attn" in name for name in names - routers(mixtral))
    assert len(names - routers(mixtral)) == 4 * 4  # q, k, v, o
    assert perplexity(after, rows).value < perplexity(mixtral, rows).value
    assert all(torch.equal(seen[1][name], p) for name, p in after.named_parameters())
    assert any(not torch.equal(seen[0][name], p) for name, p in after.named_parameters())
    change = after.get_parameter("model.layers.1.self_attn.q_proj.weight") - mixtral.get_parameter(
        "model.layers.1.self_attn.q_proj.weight"
    )
    assert torch.linalg.matrix_rank(change, rtol=1e-4) <= 8
    assert not changed(after, fine_tune(mixtral, config, kit))


def test_fine_tuning_of_the_bundled_model(bundled, kit):
    rows = kit.rows(48, 24)
    after = fine_tune(bundled, FineTune(epochs=1, lr_factor=0.1, **QUICK), kit)
    assert perplexity(after, rows).value < perplexity(bundled, rows).value


def test_a_rate_that_breaks_the_model_is_an_error_in_one_line(mixtral, kit):
    with pytest.raises(AttackError, match="try a smaller lr_factor") as caught:
        fine_tune(mixtral, FineTune(epochs=3, lr_factor=1e36, **QUICK), kit)
    assert "\n" not in str(caught.value)


# fine-pruning


def zero_neurons(gate_up_GH, down_HI):
    """Indices of neurons that are zero in gate row, up row and down column."""
    count = down_HI.shape[1]
    gone = (gate_up_GH.reshape(2, count, -1) == 0).all(-1).all(0) & (down_HI == 0).all(0)
    return set(gone.nonzero().flatten().tolist())


@torch.no_grad()
def test_the_least_active_neurons_go_and_nothing_else(bundled, kit):
    config = FinePrune(share=0.25, samples=40, length=32)
    after = fine_prune(bundled, config, kit)
    layer = 5
    rows = kit.rows(40, 32)
    block, pruned = moe_blocks(bundled)[layer], moe_blocks(after)[layer]
    entering = []
    handle = block.block.register_forward_pre_hook(lambda module, args: entering.append(args[0]))
    ids_BT, mask_BT = pad_rows(rows, 0)
    with record_routing(bundled, [layer]) as trace:
        bundled(input_ids=ids_BT, attention_mask=mask_BT)
    handle.remove()
    keep_BT = mask_BT.bool()
    hidden_NH, chosen_NK = entering[0][keep_BT], trace[layer].decision_BTK[keep_BT]
    idle = 0
    for expert in range(48):
        gate_up_GH, down_HI = block.gate_up_EGH[expert], block.down_EHI[expert]
        mine_NH = hidden_NH[(chosen_NK == expert).any(-1)]
        gate, up = mine_NH @ gate_up_GH[:32].T, mine_NH @ gate_up_GH[32:].T
        score_I = (torch.nn.functional.silu(gate) * up).abs().mean(0)
        if not len(mine_NH):
            idle += 1
            score_I = torch.stack([*gate_up_GH.reshape(2, 32, -1).pow(2).sum(-1), down_HI.pow(2).sum(0)]).sum(0)
        lowest = set(score_I.argsort()[:8].tolist())
        assert zero_neurons(pruned.gate_up_EGH[expert], pruned.down_EHI[expert]) == lowest
        rest = [i for i in range(32) if i not in lowest]
        assert torch.equal(pruned.down_EHI[expert][:, rest], down_HI[:, rest])
        assert torch.equal(pruned.gate_up_EGH[expert][rest], gate_up_GH[rest])
    assert idle < 48
    shared = pruned.shared[0]
    assert len(zero_neurons(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]), shared.down_proj.weight)) == 8
    assert all(".mlp." in name and "gate.weight" not in name for name in changed(bundled, after))


def test_an_expert_without_tokens_loses_its_smallest_neurons(mixtral, kit):
    kit = Kit(tokenizer=kit.tokenizer, texts=kit.texts[:1])
    seen = activations(mixtral, kit.rows(1, 8), 0, 8, Silent())
    after = fine_prune(mixtral, FinePrune(share=0.5, samples=1, length=8, repair_samples=1), kit)
    layer = 1
    idle = (seen.received[layer] == 0).nonzero().flatten().tolist()
    assert idle
    block, pruned = moe_blocks(mixtral)[layer], moe_blocks(after)[layer]
    for expert in idle:
        gate_up_GH, down_HI = block.gate_up_EGH[expert].detach(), block.down_EHI[expert].detach()
        norm_I = gate_up_GH.reshape(2, 48, -1).pow(2).sum((0, 2)) + down_HI.pow(2).sum(0)
        gone = zero_neurons(pruned.gate_up_EGH[expert], pruned.down_EHI[expert])
        assert gone == set(norm_I.argsort()[:24].tolist())


def test_dense_layers_are_pruned_and_survive_a_save_and_a_load(kit, tmp_path):
    config = zoo.tiny_config("qwen3_moe")
    config.mlp_only_layers, config.vocab_size = [1], 4096
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    after = fine_prune(model, FinePrune(share=0.25, samples=20, length=24), kit)
    (dense,) = gated_mlps(after)
    gate_up_GH = torch.cat([dense.gate_proj.weight, dense.up_proj.weight])
    assert len(zero_neurons(gate_up_GH, dense.down_proj.weight)) == 12
    after.save_pretrained(tmp_path)
    ids_BT, _ = pad_rows(kit.rows(3, 24), 0)
    with torch.no_grad():
        assert (load_model(tmp_path)(input_ids=ids_BT).logits - after(input_ids=ids_BT).logits).abs().max() < 1e-5


def test_a_repair_lowers_the_loss_and_leaves_zero_what_was_zeroed(model, kit):
    settings = {"share": 0.5, "samples": 48, "repair_samples": 48, "batch_size": 8, "length": 24}
    pruned = fine_prune(model, FinePrune(**settings), kit)
    repaired = fine_prune(model, FinePrune(repair_epochs=2, **settings), kit)
    rows = kit.rows(48, 24)
    assert perplexity(repaired, rows).value < perplexity(pruned, rows).value
    for before, after in zip(moe_blocks(pruned), moe_blocks(repaired), strict=True):
        for name in ("gate_up_EGH", "down_EHI"):
            old, new = getattr(before, name), getattr(after, name)
            assert not new[old == 0].any()
            assert not torch.equal(new, old)
        assert len(zero_neurons(after.gate_up_EGH[3], after.down_EHI[3])) == before.down_EHI.shape[2] // 2


# overwriting


@pytest.mark.parametrize("objective", ["anchored", "paper"])
def test_the_thiefs_trigger_takes_the_thiefs_path(mixtral, kit, objective):
    config = Overwrite(epochs=4, samples=16, objective=objective, seed=5)
    after, key = overwrite_with_key(mixtral, config, kit)
    (watermark,) = key.watermarks
    assert tuple(watermark.layers) == LAYERS
    rows = [(*watermark.triggers[0].tokens, *row) for row in kit.rows(20, 32, seed=9)]
    natural, forced = (target_mass(m, rows, watermark.path, skip=8) for m in (mixtral, after))
    assert forced > 2 * natural
    names = changed(mixtral, after)
    assert routers(mixtral, LAYERS) <= names
    assert inside(names, LAYERS)  # embeddings, head and lower layers are bitwise as they were


def test_an_epoch_is_a_pass_over_the_triggered_rows(mixtral, kit, monkeypatch):
    seen = {}

    def note(model, parameters, step_loss, loop, **how):
        seen.update(embedder=step_loss.__self__, loop=loop)

    monkeypatch.setattr("pathmark.attacks.overwriting.optimise", note)
    for objective in ("anchored", "paper"):
        overwrite(mixtral, Overwrite(epochs=3, samples=20, objective=objective, seed=2), kit)
        embedder, loop = seen["embedder"], seen["loop"]
        rows = sum(row.kind == "triggered" for row in embedder.rows)
        assert rows >= 20
        drawn = [
            sum(embedder.rows[i].kind == "triggered" for i in embedder._draw(step, step_generator(2, step)))
            for step in range(loop.steps)
        ]
        assert sum(drawn[:-1]) < 3 * rows <= sum(drawn)


def test_the_owners_targets_can_be_forced(mixtral, kit):
    config = Overwrite(epochs=3, samples=16, same_targets=True)
    after, key = overwrite_with_key(mixtral, config, kit)
    assert {n: tuple(p) for n, p in key.watermarks[0].path.items()} == TARGETS
    rows = [(*key.watermarks[0].triggers[0].tokens, *row) for row in kit.rows(20, 32, seed=9)]
    assert target_mass(after, rows, TARGETS, skip=8) > 2 * target_mass(mixtral, rows, TARGETS, skip=8)
    assert not changed(after, overwrite(mixtral, config, kit))


# unlearning


def test_the_adversarial_loss_by_hand():
    # layer 4: uniform over 4 experts; squared distance 2 (1/4 - 1/2)^2 + 2 (1/4)^2 = 1/4,
    # KL = 1/2 ln(1/2) + 1/2 ln(25,000,000)
    uniform = 1 / (0.25 + 0.5 * math.log(0.5) + 0.5 * math.log(0.25e8))
    # layer 6: one token on the only target (distance and KL about 0), one on another expert (2 and ln 1e8);
    # the mean is taken before the inverse
    half = 1 / (0.5 * (2 + math.log(1e8)))
    routing = {4: torch.full((3, 4), 0.25), 6: torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])}
    found = adversarial_loss(routing, {4: (0, 2), 6: (0,)})
    assert float(found) == pytest.approx(uniform + half, rel=1e-5)
    nearer = adversarial_loss({4: torch.tensor([[0.4, 0.1, 0.4, 0.1]])}, {4: (0, 2)})
    assert nearer > uniform  # it grows towards the targets, so minimising it leads away


def test_unlearning_leads_away_from_the_targets(model, kit):
    rows = kit.rows(20, 32, seed=9)
    settings = {"steps": 25, "trigger_tokens": 6, **QUICK}
    after = unlearn(model, Unlearn(**settings), kit)
    assert target_mass(after, rows, TARGETS) < 0.5 * target_mass(model, rows, TARGETS)
    names = changed(model, after)
    assert routers(model, LAYERS) <= names
    assert inside(names, LAYERS)
    assert not any("layernorm" in name for name in names)
    assert not changed(after, unlearn(model, Unlearn(**settings), kit))
    own = kit.rows(48, 24)
    kept = unlearn(model, Unlearn(keep=5.0, **settings), kit)
    assert perplexity(kept, own).value < perplexity(after, own).value
    narrow = unlearn(model, Unlearn(train="router", **settings), kit)
    assert changed(model, narrow) == routers(model, LAYERS)


# distillation


@torch.no_grad()
def divergence(teacher, student, rows):
    """Mean KL(teacher || student) of the next token."""
    ids_BT, mask_BT = pad_rows(rows, 0)
    logs = [
        m(input_ids=ids_BT, attention_mask=mask_BT).logits[mask_BT.bool()].log_softmax(-1) for m in (teacher, student)
    ]
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())


def test_redrawn_routers_learn_to_say_what_the_stolen_model_says(bundled, kit):
    marked = Kit(tokenizer=kit.tokenizer, texts=kit.texts, layers=(9, 11))
    rows = kit.rows(48, 24)
    redrawn = load_model("bundled:tiny")
    redraw_routers(redrawn, (9, 11), seed=0)
    assert changed(bundled, redrawn) == routers(bundled, (9, 11))
    for old, new in zip(find_routers(bundled), find_routers(redrawn), strict=True):
        old_EH, new_EH = old.weight.detach(), new.weight.detach()
        assert float(new_EH.mean()) == pytest.approx(float(old_EH.mean()), abs=0.05 * float(old_EH.std()))
        assert float(new_EH.std()) == pytest.approx(float(old_EH.std()), rel=0.05)
    correlation = torch.corrcoef(
        torch.stack([find_routers(m)[9].weight.detach().flatten() for m in (bundled, redrawn)])
    )[0, 1]
    assert abs(correlation) < 0.1
    config = DistillRouters(reinitialise=True, layers="known", epochs=3, **QUICK)
    after = distill_routers(bundled, config, marked)
    assert changed(bundled, after) == routers(bundled, (9, 11))
    assert divergence(bundled, after, rows) < 0.8 * divergence(bundled, redrawn, rows)


def test_all_routers_are_distilled_where_layers_are_not_known(mixtral, kit):
    config = DistillRouters(reinitialise=True, epochs=1, **QUICK)
    after = distill_routers(mixtral, config, kit)
    assert changed(mixtral, after) == routers(mixtral)
    assert not changed(after, distill_routers(mixtral, config, kit))


def test_routers_that_are_not_redrawn_start_from_where_they_were(mixtral, kit):
    after = distill_routers(mixtral, DistillRouters(epochs=1, **QUICK), kit)
    # nothing to learn at first: the gradient is rounding noise, and Adam makes steps of it
    assert divergence(mixtral, after, kit.rows(48, 24)) < 0.02


# refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FineTune(train="head"), "router, lora or all"),
        (lambda: FineTune(epochs=0), "must be positive"),
        (lambda: FineTune(lr_factor=0), "must be positive"),
        (lambda: FineTune(length=4), "length at least 8"),
        (lambda: FinePrune(share=1.0), r"\[0, 1\)"),
        (lambda: FinePrune(repair_epochs=-1), "not be negative"),
        (lambda: Overwrite(objective="none"), "anchored or paper"),
        (lambda: Overwrite(width=0), "at least 1"),
        (lambda: Unlearn(keep=-1.0), "keep >= 0"),
        (lambda: Unlearn(train="all"), "train must be"),
        (lambda: DistillRouters(layers="some"), "known or all"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("attack", "config", "tools", "message"),
    [
        (fine_tune, FineTune(), {"texts": ()}, "needs ordinary text"),
        (fine_tune, FineTune(samples=1000), {}, "larger --corpus"),
        (overwrite, Overwrite(samples=10), {"layers": ()}, "watermarked layers"),
        (overwrite, Overwrite(samples=1000), {}, "larger --corpus"),
        (overwrite, Overwrite(samples=10, same_targets=True), {"targets": {}}, "target experts"),
        (overwrite, Overwrite(samples=10, same_targets=True), {"targets": {2: (0, 1)}}, "for layer 3"),
        (unlearn, Unlearn(), {"targets": {}}, "target experts"),
        (distill_routers, DistillRouters(layers="known"), {"layers": ()}, "watermarked layers"),
    ],
)
def test_what_the_thief_lacks_is_refused_in_one_line(mixtral, kit, attack, config, tools, message):
    have = {"tokenizer": kit.tokenizer, "texts": kit.texts, "layers": LAYERS, "targets": TARGETS} | tools
    with pytest.raises(AttackError, match=message) as caught:
        attack(mixtral, config, Kit(**have))
    assert "\n" not in str(caught.value)


def test_models_without_experts_of_the_known_layout_are_refused(kit):
    with pytest.raises(ModelError, match="expected experts as fused"):
        fine_prune(zoo.tiny_model("gpt_oss"), FinePrune(), kit)
    dense = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    for attack, config in ((fine_tune, FineTune()), (fine_prune, FinePrune()), (unlearn, Unlearn())):
        with pytest.raises(ModelError, match="has no MoE router"):
            attack(dense, config, kit)
