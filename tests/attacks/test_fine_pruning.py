"""Fine-pruning: the idle neurons go and nothing else, and a repair leaves them gone."""

from __future__ import annotations

import torch
import zoo
from attack_helpers import changed
from transformers import AutoModelForCausalLM

from pathmark.attacks.blocks import gated_mlps, moe_blocks
from pathmark.attacks.kit import Kit
from pathmark.attacks.pruning import FinePrune, activations, fine_prune
from pathmark.models import (
    load_model,
    pad_rows,
    perplexity,
    record_routing,
)
from pathmark.progress import Silent


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
    for expert in range(64):
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
    assert idle < 64
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
