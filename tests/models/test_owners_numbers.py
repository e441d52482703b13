"""Whose token is whose, and under which config: what is put right, and what is left alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zoo

from pathmark.models import load_model, load_tokenizer
from pathmark.models.original import Original, attachments_of, behaviour, owners_configs, read_original
from pathmark.models.vocabulary import by_embedding, by_strings, embedding_sketch, is_identity, renumbered

TOKENS, HIDDEN = 500, 96


@pytest.fixture(scope="module")
def rows():
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_rows_are_known_again_after_training(rows, noise):
    """Noise of up to 0.3 of a row is more than fine-tuning changes an embedding."""
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(2))
    moved = rows[order] + noise * torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3))
    found = by_embedding(embedding_sketch(rows).astype(np.float16), moved)
    right = (found == order.argsort().numpy()).mean()
    assert right > 0.99
    assert not is_identity(found)


def test_of_two_that_claim_a_row_the_more_similar_has_it(rows):
    twins = rows.clone()
    twins[7] = rows[3] + 0.05 * rows[9]  # the owner's token 7 looks like 3; the suspect has 3 once, and no 7
    found = by_embedding(embedding_sketch(twins), torch.cat([rows[:7], rows[8:]]))
    assert found[3] == 3
    assert found[7] == -1


def test_strangers_rows_say_nothing(rows):
    other = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(9))
    assert by_embedding(embedding_sketch(rows), other) is None


def test_strings_say_which_token_is_which():
    tokenizer = load_tokenizer("bundled:tiny")
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert is_identity(by_strings(tokens, tokenizer))
    assert by_strings(["none of these"] * 9 + tokens[:3], tokenizer) is None
    assert by_strings([*tokens[:3], "nowhere"], tokenizer).tolist() == [0, 1, 2, -1]


@torch.no_grad()
def test_a_renumbered_model_is_as_it_was_afterwards():
    model, ids = zoo.tiny_model("qwen3_moe"), torch.arange(3, 20)[None]
    plain = model(ids).logits
    places = np.random.default_rng(0).permutation(128)
    with renumbered(model, places):
        assert torch.allclose(model(ids).logits, model.lm_head(model.model(ids).last_hidden_state), atol=1e-6)
        inside = model(ids).logits
    assert torch.equal(model(ids).logits, plain)
    theirs = model(torch.from_numpy(places)[ids]).logits  # what the suspect says to its own numbers
    assert torch.allclose(inside, theirs[..., torch.from_numpy(places)], atol=1e-6)


def test_a_key_keeps_what_the_original_says_of_itself():
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    rows = [tokenizer("The people of the United States", add_special_tokens=False)["input_ids"]]
    known = read_original(attachments_of(model, tokenizer, rows))
    assert known.config == behaviour(model.config)
    assert known.tokens[5] == tokenizer.convert_ids_to_tokens(5)
    assert known.sketch_VP.shape == (4096, 64)
    assert 0 < known.loss < 8
    assert read_original({}).attached == ()


def test_the_owners_rules_in_the_suspects_shapes():
    config = zoo.tiny_config("qwen3_moe")
    original = Original(config=behaviour(config))
    assert owners_configs(original, config) == []
    assert owners_configs(Original(), config) == []
    pruned = zoo.tiny_config("qwen3_moe")
    pruned.num_experts, pruned.rms_norm_eps, pruned.num_experts_per_tok = 6, 9.0, 1
    whole, fitted = owners_configs(original, pruned)
    assert (whole.num_experts, whole.rms_norm_eps) == (8, config.rms_norm_eps)
    assert (fitted.num_experts, fitted.rms_norm_eps, fitted.num_experts_per_tok) == (6, config.rms_norm_eps, 2)
    (alone,) = owners_configs(original, None)
    assert behaviour(alone) == original.config
    harmless = zoo.tiny_config("qwen3_moe")
    harmless.eos_token_id, harmless.use_cache = 9, False
    assert owners_configs(original, harmless) == []
