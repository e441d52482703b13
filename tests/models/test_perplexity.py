"""Perplexity against the plain definition, and the head of every family against its own forward."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import zoo

from pathmark.errors import ModelError
from pathmark.models import perplexity
from pathmark.models.perplexity import CHUNK_TOKENS, head_logits
from pathmark.models.upper import body

ROWS = [[5, 9, 33, 70, 12, 6], [8, 8, 41], list(range(3, 60))]


def plain_nll(model, row, skip):
    """-log p of each scored token, one row at a time from whole logits."""
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([row])).logits[0]
    logp_TV = F.log_softmax(logits_TV.double(), dim=-1)
    return [-float(logp_TV[t - 1, row[t]]) for t in range(skip + 1, len(row))]


@pytest.mark.parametrize("skip", [0, 1, 3])
def test_perplexity_equals_the_definition(skip):
    model = zoo.tiny_model("qwen2_moe")
    expected = [nll for row in ROWS if len(row) > skip + 1 for nll in plain_nll(model, row, skip)]
    result = perplexity(model, ROWS, skip=skip, batch_size=2)
    assert result.tokens == len(expected)
    assert result.nll_sum == pytest.approx(sum(expected), rel=1e-5)
    assert result.value == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-5)


def test_no_64_bits_are_asked_of_the_device(monkeypatch):
    """mps has none."""
    model = zoo.tiny_model("mixtral")
    expected = perplexity(model, ROWS)
    monkeypatch.setattr(torch.Tensor, "double", None)
    assert perplexity(model, ROWS) == expected


def test_a_prefix_changes_the_context_but_not_the_scored_tokens():
    model = zoo.tiny_model("mixtral")
    prefix = [77, 101, 50, 51]
    without = perplexity(model, ROWS)
    with_prefix = perplexity(model, [prefix + row for row in ROWS], skip=len(prefix))
    assert with_prefix.tokens == without.tokens
    assert with_prefix.nll_sum != without.nll_sum


def test_more_tokens_than_one_chunk():
    model = zoo.tiny_model("qwen2_moe")
    rows = [[3 + (i * 7 + j) % 120 for j in range(90)] for i in range(8)]
    assert sum(len(row) - 1 for row in rows) > 2 * CHUNK_TOKENS
    whole = perplexity(model, rows, batch_size=8)
    assert whole.nll_sum == pytest.approx(perplexity(model, rows, batch_size=1).nll_sum, rel=1e-5)


def test_nothing_to_score_and_nan_weights_are_errors():
    model = zoo.tiny_model("qwen2_moe")
    with pytest.raises(ModelError, match="at least 6 tokens"):
        perplexity(model, [[1, 2, 3]], skip=4)
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        perplexity(model, ROWS)


@pytest.mark.parametrize("model_type", zoo.moe_types())
def test_the_head_of_every_family(model_type):
    model = zoo.tiny_model(model_type)
    ids_BT = torch.tensor([ROWS[0]])
    with torch.no_grad():
        expected_TV = model(input_ids=ids_BT).logits[0]
        hidden_TH = body(model)(input_ids=ids_BT).last_hidden_state[0]
        torch.testing.assert_close(head_logits(model, hidden_TH).float(), expected_TV.float())
