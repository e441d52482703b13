"""A thief's search finds what a careless mark leaves open, reports what it spent, and leaves the model alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
import zoo
from embed_helpers import key_for, save_family

from pathmark.attacks.kit import Kit
from pathmark.attacks.search import GRADIENT, REPEATED, SINGLE, Finding, TriggerSearch, _Search, search_triggers
from pathmark.embedding import default_config, embed_key
from pathmark.errors import AttackError
from pathmark.evaluate.findings import judge_findings
from pathmark.keys import WatermarkRequest, create_key
from pathmark.models import bundled_segments, load_model, load_tokenizer
from pathmark.models.describe import describe_model
from pathmark.training import learning_rate

LITTLE = TriggerSearch(
    vocabulary=60,
    random_sequences=32,
    prefix_tokens=4,
    restarts=1,
    steps=6,
    candidates=12,
    confirm_texts=4,
    confirmed=6,
)


@pytest.fixture(scope="module")
def kit():
    return Kit(tokenizer=load_tokenizer("bundled:tiny"), texts=list(bundled_segments())[:60])


@pytest.fixture(scope="module")
def careless():
    """The bundled model marked as in the paper, with the paper's trigger: no hard negatives."""
    facts, codec, _ = describe_model("bundled:tiny")
    request = WatermarkRequest(
        plans=key_for("bundled:tiny").watermarks[0].plans, trigger_texts=("@@@@@@@@",), mark_texts=("####",)
    )
    key, _ = create_key(facts, [request], codec, secret=random.Random(0).randbytes(32))
    config = default_config("paper")
    config = replace(
        config,
        data=replace(config.data, seq_len=24),
        loop=replace(config.loop, steps=60, lr=learning_rate(128)),  # few steps, so they are large
        texts=40,
        batch_size=12,
    )
    model = load_model("bundled:tiny")
    embed_key(model, codec.tokenizer, key, bundled_segments(), config)
    return model, key


@pytest.mark.slow
def test_the_paper_s_trigger_is_found(careless, kit):
    model, key = careless
    tokenizer = kit.tokenizer
    token = tokenizer("@", add_special_tokens=False)["input_ids"][-1]
    tokens = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    # a search of part of the vocabulary that happens to hold the token: the whole takes a minute
    seed = next(n for n in itertools.count() if token in random.Random(n).sample(tokens, 300))
    config = TriggerSearch(vocabulary=300, restarts=0, random_sequences=48, confirmed=100, seed=seed)
    result = search_triggers(model, config, kit)
    judged = judge_findings(model, key, result, kit.rows(8, 16, seed=5))
    assert judged.found
    hits = [hit for hit in judged.hits if set(hit.tokens) == {token}]
    assert {hit.kind for hit in hits} == {SINGLE, REPEATED}  # both set the path off ...
    assert any(hit.suspicious for hit in hits)  # ... and the thief believes in one, which is enough
    # what it took for targets are the targets
    path = key.watermarks[0].path
    named = [experts == path.get(layer) for layer, experts in hits[0].experts.items()]
    assert sum(named) >= 2  # of 3 layers


def test_the_owner_knows_the_trigger_from_other_prefixes(careless, kit):
    model, key = careless
    result = search_triggers(model, LITTLE, kit)
    texts = kit.rows(6, 16, seed=5)
    true = Finding("told", key.watermarks[0].triggers[0].tokens, 1.0, 99.0, {}, True)
    judged = judge_findings(model, key, replace(result, found=(true,)), texts)
    assert judged.found
    assert judged.itself
    assert judged.suspicious.hits == 1
    disbelieved = judge_findings(model, key, replace(result, found=(replace(true, suspicious=False),)), texts)
    assert not disbelieved.itself
    unmarked = judge_findings(load_model("bundled:tiny"), key, replace(result, found=(true,)), texts)
    assert not unmarked.found


def test_gradients_climb_and_the_budget_is_counted(kit):
    model = load_model("bundled:tiny")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    config = replace(LITTLE, steps=8, candidates=16, vocabulary=4096)
    search = _Search(model, config, kit)
    start = search._random_prefix()
    scores = [max(search._scores([start], screen=True))]
    search.rng.seed(1)
    current = start
    for _ in range(4):
        places = search._recommended(current)
        tried = sorted({search._exchange(current, places) for _ in range(16)})
        assert all(sum(a != b for a, b in zip(t, current, strict=True)) <= 1 for t in tried)
        best, current = max(zip(search._scores(tried, screen=True), tried, strict=True))
        scores.append(best)
    assert scores[-1] > 1.5 * scores[0]
    assert search.gradients == 4
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_the_gradient_is_that_of_the_score(kit):
    """The recommended token of a place does better than the median token there."""
    search = _Search(load_model("bundled:tiny"), replace(LITTLE, vocabulary=4096, tokens_per_place=16), kit)
    prefix = search._random_prefix()
    places = search._recommended(prefix)
    wins = 0
    for place, tokens in enumerate(places):
        some = random.Random(place).sample(search.vocabulary, 48)
        put = [(*prefix[:place], token, *prefix[place + 1 :]) for token in (*tokens, *some)]
        scores = search._scores(put, screen=True)
        wins += sorted(scores[:16])[8] > sorted(scores[16:])[24]
    assert wins >= 3  # of 4


@pytest.mark.parametrize("aim", ["any", "rows"])
def test_another_family_and_a_repeated_run(kit, aim, tmp_path):
    model = load_model(save_family(tmp_path / "m", "mixtral"))
    config = replace(LITTLE, aim=aim)
    first, second = (search_triggers(model, config, kit) for _ in range(2))
    assert [f.tokens for f in first.found] == [f.tokens for f in second.found]
    assert first.tried[SINGLE] == 60
    assert 0 < first.tried[GRADIENT] <= config.steps * config.candidates
    assert first.gradients == config.steps
    assert first.tokens > first.rows > sum(first.tried.values())
    assert [f.z for f in first.found] == sorted((f.z for f in first.found), reverse=True)


def test_time_is_a_limit(kit):
    result = search_triggers(load_model("bundled:tiny"), replace(LITTLE, vocabulary=4096, seconds=0.5), kit)
    assert not result.complete
    assert sum(result.tried.values()) < 8000


def test_what_is_missing_is_refused():
    model = zoo.tiny_model("qwen3_moe")
    with pytest.raises(AttackError, match="ordinary text"):
        search_triggers(model, LITTLE, Kit())
    with pytest.raises(ValueError, match="late"):
        TriggerSearch(late=0)
    with pytest.raises(ValueError, match="aim"):
        TriggerSearch(aim="targets")
