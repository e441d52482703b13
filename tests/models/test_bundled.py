"""What the bundled model must be, and that its card tells the truth."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import pytest

from pathmark.models import (
    bundled_probes,
    bundled_segments,
    find_routers,
    inspect_model,
    load_model,
    load_tokenizer,
    perplexity,
)

ROOT = Path(__file__).parent.parent.parent
BUNDLED = ROOT / "src" / "pathmark" / "bundled"
sys.path.insert(0, str(ROOT / "scripts"))


@cache
def tiny():
    return load_model("bundled:tiny"), load_tokenizer("bundled:tiny")


@cache
def token_rows():
    return [tiny()[1](text)["input_ids"] for text in bundled_probes()]


@pytest.fixture(scope="module")
def figures():
    return json.loads((BUNDLED / "model_card.json").read_text(encoding="utf-8"))


def test_shape():
    model, tokenizer = tiny()
    report = inspect_model("bundled:tiny")
    assert report.model_type == "qwen3_moe"
    assert len(report.layers) == 8
    assert all(layer.experts >= 32 and layer.top_k == 4 for layer in report.layers)
    assert model.config.norm_topk_prob
    sizes = (model.config.hidden_size, model.config.moe_intermediate_size, model.config.head_dim)
    assert all(size % 32 == 0 for size in sizes)  # the groups of GPTQ and the blocks of GGUF
    assert not model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert model.config.max_position_embeddings >= 1024
    assert tokenizer.is_fast
    assert tokenizer.decode(tokenizer("Fellow citizens…\n\tü")["input_ids"]) == "Fellow citizens…\n\tü"


def test_chat_template():
    tokenizer = tiny()[1]
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_size_in_the_repository():
    assert sum(file.stat().st_size for file in BUNDLED.rglob("*") if file.is_file()) <= 20_000_000


def test_texts():
    segments, probes = bundled_segments(), bundled_probes()
    assert len(set(segments)) >= 2_900
    assert len(set(probes)) >= 300
    assert min(map(len, token_rows())) >= 512
    tokenizer = tiny()[1]
    assert min(len(tokenizer(text)["input_ids"]) for text in segments) >= 128


def test_probes_are_held_out():
    # no run of 150 characters of a probe stands in a segment: its pieces at every 50th position are looked for
    width, step = 100, 50
    pieces = {
        probe[i : i + width]: number
        for number, probe in enumerate(bundled_probes())
        for i in range(0, len(probe) - width, step)
    }
    shared = {
        pieces[text[i : i + width]]
        for text in bundled_segments()
        for i in range(len(text) - width + 1)
        if text[i : i + width] in pieces
    }
    assert not shared, f"{len(shared)} probes repeat training text: {sorted(shared)}"


@pytest.mark.parametrize("length", [128, 512])
def test_perplexity_is_what_the_card_says(figures, length):
    rows = [row[:length] for row in token_rows()[:60]]
    stated = figures["perplexity"][str(length)]["value"]
    # 60 of the probes: another sample of the same texts, so within a tenth
    assert perplexity(tiny()[0], rows).value == pytest.approx(stated, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("length", [128, 512])
def test_perplexity_is_exactly_what_the_card_says(figures, length):
    stated = figures["perplexity"][str(length)]
    result = perplexity(tiny()[0], [row[:length] for row in token_rows()])
    assert result.tokens == stated["tokens"]
    assert result.value == pytest.approx(stated["value"], rel=1e-3)


def test_the_card_speaks_of_these_weights(figures):
    import hashlib

    import model_card

    weights = (BUNDLED / "tiny" / "model.safetensors").read_bytes()
    assert figures["model_sha256"] == hashlib.sha256(weights).hexdigest()
    assert (BUNDLED / "tiny" / "README.md").read_text(encoding="utf-8") == model_card.card(figures)


def test_no_expert_is_dead(figures):
    import model_card

    model, tokenizer = tiny()
    rows = model_card.load_balance(model, tokenizer, find_routers(model))
    assert [row["dead"] for row in rows] == [0] * len(rows)
    assert rows == [pytest.approx(stated, rel=0.02) for stated in figures["load_balance"]]


def test_routing_matters_in_every_layer(figures):
    import model_card

    costs = [row["shuffled_experts"] - 1 for row in figures["routing_effect"]["per_layer"]]
    assert min(costs[len(costs) // 2 :]) >= 0.05
    assert max(costs) <= 10 * min(costs)
    model = tiny()[0]
    rows = [row[:128] for row in token_rows()[:40]]
    sound = perplexity(model, rows).value
    sites = find_routers(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for site in (sites[0], sites[-1]):
        with model_card.shuffled_experts(site, seed=1):
            assert perplexity(model, rows).value > 1.03 * sound
    with model_card.random_routers(sites, seed=1):
        assert perplexity(model, rows).value > 1.5 * sound
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
