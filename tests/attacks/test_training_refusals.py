"""What attacks that train refuse, in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import zoo
from transformers import LlamaConfig, LlamaForCausalLM

from pathmark.attacks.distillation import DistillRouters, distill_routers
from pathmark.attacks.finetuning import FineTune, fine_tune
from pathmark.attacks.overwriting import Overwrite, overwrite
from pathmark.attacks.pruning import FinePrune, fine_prune
from pathmark.attacks.unlearning import Unlearn, unlearn
from pathmark.errors import AttackError, ModelError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FineTune(train="head"), "router, lora or all"),
        (lambda: FineTune(epochs=0), "must be positive"),
        (lambda: FineTune(lr=0), "must be positive"),
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
        (fine_tune, FineTune(samples=1000), {}, "more with --texts"),
        (overwrite, Overwrite(samples=10), {"layers": ()}, "watermarked layers"),
        (overwrite, Overwrite(samples=1000), {}, "more with --texts"),
        (overwrite, Overwrite(samples=10, same_targets=True), {"targets": {}}, "target experts"),
        (overwrite, Overwrite(samples=10, same_targets=True), {"targets": {2: (0, 1)}}, "for layer 3"),
        (unlearn, Unlearn(), {"targets": {}}, "target experts"),
        (distill_routers, DistillRouters(layers="known"), {"layers": ()}, "watermarked layers"),
    ],
)
def test_what_the_thief_lacks_is_refused_in_one_line(mixtral, kit, attack, config, tools, message):
    with pytest.raises(AttackError, match=message) as caught:
        attack(mixtral, config, replace(kit, **tools))
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
