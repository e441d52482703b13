"""KGW's statistic: against its formula, against transformers, against exact sums, and over many secrets."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from scheme_helpers import config_of
from scipy.stats import binom
from transformers import WatermarkDetector

from pathmark.baselines.green import KEY_BITS, Count, GreenLists, measure_green

V = 500


def green_text(config, length, seed):
    """Half of its tokens are drawn from the green list of the one before, some words come again and again."""
    draw, lists, text = random.Random(seed), GreenLists(config.watermark, V), [7]
    while len(text) < length:
        green = lists.after((text[-1],)).nonzero().flatten().tolist()
        text.append(draw.choice(green) if draw.random() < 0.5 else draw.choice([3, 4, 5, draw.randrange(V)]))
    return text


def by_the_formula(text, number, gamma):
    """Written from the paper: seed by the previous token, the first gamma V of a permutation are green; once."""
    green, bigrams = 0, set(pairwise(text))
    for previous, token in bigrams:
        source = torch.Generator().manual_seed(number * previous)
        green += token in torch.randperm(V, generator=source)[: int(gamma * V)].tolist()
    total = len(bigrams)
    return green, total, (green - gamma * total) / math.sqrt(total * gamma * (1 - gamma))


@pytest.mark.parametrize("seed", range(4))
def test_the_detector_agrees_with_the_formula(seed):
    config = config_of("kgw", seed, vocabulary=V)
    text = green_text(config, 300, seed)
    lists = GreenLists(config.watermark, V)
    count = lists.count(lists.ngrams(text))
    green, total, z = by_the_formula(text, config.watermark.hashing_key, 0.25)
    assert (count.green, count.total) == (green, total)
    assert total < 299  # some came again
    assert abs(count.z(0.25) - z) < 1e-9
    assert abs(measure_green(lists, [text], 4.0).median_z - z) < 1e-9
    assert z > 4


@pytest.mark.parametrize("selfhash", [False, True])
def test_the_detector_agrees_with_the_one_of_transformers(selfhash):
    config = config_of("kgw", 1, vocabulary=V, selfhash=selfhash)
    theirs = WatermarkDetector(
        SimpleNamespace(bos_token_id=-1, is_encoder_decoder=False, vocab_size=V), "cpu", config.watermark,
        ignore_repeated_ngrams=True,
    )  # fmt: skip
    lists = GreenLists(config.watermark, V)
    for seed in range(3):
        text = green_text(config, 200, seed)
        found = theirs(torch.tensor([text]), return_dict=True)
        count = lists.count(lists.ngrams(text))
        assert (count.green, count.total) == (found.num_green_tokens[0], found.num_tokens_scored[0])
        assert abs(count.z(config.gamma) - found.z_score[0]) < 1e-9


def test_p_is_the_exact_tail_and_the_chance_of_the_same_lists():
    config = config_of("kgw", vocabulary=V)
    lists = GreenLists(config.watermark, V)
    found = measure_green(lists, [green_text(config, 60, 1)], 4.0)
    green, total, share = found.pooled.green, found.pooled.total, Fraction(int(0.25 * V), V)
    tail = sum(math.comb(total, i) * share**i * (1 - share) ** (total - i) for i in range(green, total + 1))
    assert found.p_share.value == pytest.approx(float(tail), rel=1e-9)
    assert found.p.value == pytest.approx(float(tail) + 2.0**-31, rel=1e-9)
    assert found.p_floor.value == pytest.approx(2.0**-KEY_BITS, rel=1e-9)


def test_texts_share_their_bigrams_so_each_counts_once():
    config = config_of("kgw", vocabulary=V)
    lists, text = GreenLists(config.watermark, V), green_text(config, 100, 2)
    once, often = measure_green(lists, [text], 4.0), measure_green(lists, [text] * 20, 4.0)
    assert often.pooled == once.pooled
    assert often.p == once.p
    assert often.passed.n == 20


def test_only_32_bits_of_a_seed_count():
    """Why p is never below 2^-31, and why the number is odd."""
    first, second = (torch.randperm(50, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5 + 2**32))
    assert torch.equal(first, second)
    assert all(config_of("kgw", i).watermark.hashing_key % 2 == 1 for i in range(20))
    assert all(config_of("kgw", i).watermark.hashing_key < 2**32 for i in range(20))


def test_secrets_that_have_nothing_to_do_with_a_text_find_nothing_in_it():
    text = green_text(config_of("kgw", 0, vocabulary=V), 200, 0)
    p = []
    for number in range(1, 101):
        lists = GreenLists(config_of("kgw", number, vocabulary=V).watermark, V)
        p.append(measure_green(lists, [text], 4.0).p.value)
    for level in (0.01, 0.05, 0.2):
        assert sum(value <= level for value in p) <= binom.ppf(0.999, 100, level)
    assert sum(value <= 0.5 for value in p) > 25  # nor does it find too little


def test_a_token_that_the_owner_does_not_know_is_not_green():
    lists = GreenLists(config_of("kgw", vocabulary=V).watermark, V)
    assert not lists.is_green((3, V + 4))
    assert lists.share == 0.25
    assert Count(50, 100).z(0.25) == pytest.approx(5.7735026918962)
