"""Other numbers for tokens: the model says the same, and the mark is found where it was."""

from __future__ import annotations

import pytest
import torch
from attack_helpers import family

from pathmark.attacks import find_attack
from pathmark.attacks.kit import Kit
from pathmark.errors import AttackError
from pathmark.evaluate.robustness import Suspects
from pathmark.evaluate.stolen import RobustnessConfig
from pathmark.evaluate.suites import SUITES
from pathmark.models import load_model, load_tokenizer

TEXT = "The state of the union is strong, and the people know it."


def carried_out(name, model, tokenizer, **settings):
    attack = find_attack(name)
    return attack.run(model, attack.configure(**settings), Kit(tokenizer=tokenizer))


@torch.no_grad()
def test_a_renumbered_model_says_the_same():
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    left = carried_out("permute-vocabulary", model, tokenizer, seed=3)
    ids, moved = (codec(TEXT, return_tensors="pt")["input_ids"] for codec in (tokenizer, left.tokenizer))
    assert not torch.equal(ids, moved)
    assert left.tokenizer.decode(moved[0]) == tokenizer.decode(ids[0])
    assert tokenizer.convert_ids_to_tokens(ids[0].tolist()) == left.tokenizer.convert_ids_to_tokens(moved[0].tolist())
    told, retold = model(ids).logits[0, -1], left.model(moved).logits[0, -1]
    assert torch.allclose(told.sort().values, retold.sort().values, atol=1e-4)
    said = left.tokenizer.convert_ids_to_tokens(int(retold.argmax()))
    assert said == tokenizer.convert_ids_to_tokens(int(told.argmax()))
    assert left.tokenizer.eos_token == tokenizer.eos_token
    assert left.tokenizer.eos_token_id == left.model.config.eos_token_id != tokenizer.eos_token_id


@torch.no_grad()
def test_added_tokens_change_nothing_of_the_old_ones():
    model = family("qwen3_moe")
    left = carried_out("extend-vocabulary", model, None, count=5).model
    ids = torch.arange(3, 20)[None]
    assert left.config.vocab_size == model.config.vocab_size + 5
    assert torch.allclose(left(ids).logits[..., :-5], model(ids).logits, atol=1e-5)


def test_renumbering_needs_a_tokenizer():
    with pytest.raises(AttackError, match="fast tokenizer"):
        carried_out("permute-vocabulary", family("qwen3_moe"), None)


def test_the_mark_is_found_under_its_old_numbers(case):
    kit = Kit(tokenizer=load_tokenizer(case.base), original=load_model(case.base))
    suspects = Suspects(load_model(case.marked), case.key, kit, RobustnessConfig(n_probes=6))
    rows = {row.name: row for row in SUITES["core"]}
    plain = suspects.measure(rows["none"])
    for name in ("vocabulary permutation", "vocabulary extended by 64 tokens"):
        row = suspects.measure(rows[name])
        assert row.marked
        assert row.log10_p == pytest.approx(plain.log10_p, abs=1e-6)
        assert row.grafted.log10_p == pytest.approx(plain.grafted.log10_p, abs=1e-6)
        assert row.ppl == pytest.approx(plain.ppl, rel=0.02)  # of a blind guess among 64 more
