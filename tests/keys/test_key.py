"""Making keys: what is drawn, what is refused, what a licensee's copy is."""

from __future__ import annotations

from dataclasses import replace
from math import comb, log2

import pytest
from key_fixtures import CODEC, golden_key, make_key, paper_model, plans

from pathmark.errors import CapacityError, KeyFileError
from pathmark.keys import LayerPlan, PoolRule, WatermarkRequest, create_key


def test_two_keys_differ() -> None:
    requests = [WatermarkRequest(plans=plans([18]))]
    first, second = (create_key(paper_model(), requests, CODEC)[0] for _ in range(2))
    assert first.secret != second.secret
    assert first.fingerprint != second.fingerprint
    assert first.watermarks[0].triggers[0].text != second.watermarks[0].triggers[0].text


def test_numbers_of_the_papers_example() -> None:
    mark = make_key().watermarks[0]
    assert mark.capacity == 30**6
    assert mark.path_count == comb(60, 2) ** 6
    assert mark.paths_after_erasures(2) == comb(60, 2) ** 4
    assert mark.layers == (18, 19, 20, 21, 22, 23)
    assert mark.pool(18) == tuple(range(60))
    assert mark.width(18) == 2
    assert len(mark.groups(18)) == 30
    assert mark.targets(18) == mark.groups(18)[mark.group_indices[0]]
    with pytest.raises(CapacityError, match="no layer 3"):
        mark.targets(3)


def test_licensees_copy_has_another_path_and_the_same_trigger() -> None:
    key = golden_key()
    copy = key.with_id(999)
    assert copy.watermarks[0].id == 999
    assert copy.watermarks[0].path == key.watermarks[0].targets_for(999) != key.watermarks[0].path
    assert copy.watermarks[0].triggers == key.watermarks[0].triggers
    assert copy.watermarks[1] == key.watermarks[1]
    assert copy.fingerprint == key.fingerprint
    assert key.with_id(7, watermark=1).watermarks[1].id == 7
    with pytest.raises(CapacityError, match="does not fit"):
        key.with_id(key.watermarks[0].capacity)
    with pytest.raises(CapacityError, match="does not exist"):
        key.with_id(1, watermark=2)


def test_layers_of_all_watermarks_each_once() -> None:
    def request(*layers: int) -> WatermarkRequest:
        return WatermarkRequest(plans=plans(layers))

    key, _ = create_key(paper_model(), [request(22, 23), request(20, 22)], CODEC)
    assert key.layers == (20, 22, 23)


def test_seeds_differ_by_purpose() -> None:
    key = make_key()
    assert key.derive_seed("probes") == key.derive_seed("probes") != key.derive_seed("decoys")
    assert 0 <= key.derive_seed("probes") < 2**63


def test_attach_counts_revisions_and_keeps_history() -> None:
    key = make_key().attach("a", b"1").attach("b", b"2").attach("a", b"3")
    assert key.revision == 3
    assert key.attachments == {"a": b"3", "b": b"2"}
    assert key.attachments_at(2)["a"].digest != key.attachments_at(3)["a"].digest
    for name in ("", "a/b", "ü", "x" * 200):
        with pytest.raises(KeyFileError, match="name"):
            key.attach(name, b"")


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([], "1 to 1024 watermarks"),
        ([WatermarkRequest(plans=plans([5], experts=8))], "has 60 experts"),
        ([WatermarkRequest(plans=plans([40]))], "no router"),
        ([WatermarkRequest(plans=plans([5], width=20))] * 4, "4 watermarks do not fit"),
        (
            [WatermarkRequest(plans=plans([5])), WatermarkRequest(plans=plans([5], width=3))],
            "one pool and one width",
        ),
        ([WatermarkRequest(plans=plans([5]), id=30)], "does not fit"),
        ([WatermarkRequest(plans=())], "at least one"),
        ([WatermarkRequest(plans=plans([5]), trigger_tokens=1)], "3 to 64"),
        ([WatermarkRequest(plans=plans([5]), trigger_texts=("  @@",))], "begin or end"),
        ([WatermarkRequest(plans=plans([5]), trigger_texts=("@@",))] * 2, "already used"),
    ],
)
def test_refusals(requests: list[WatermarkRequest], said: str) -> None:
    with pytest.raises(CapacityError, match=said):
        create_key(paper_model(), requests, CODEC)


def test_free_text_is_possible_with_a_warning() -> None:
    request = WatermarkRequest(plans=plans([5, 6]), trigger_texts=("@@@@@@@@",), mark_texts=("Made by Example",))
    key, warnings = create_key(paper_model(), [request], CODEC)
    trigger = key.watermarks[0].triggers[0]
    assert trigger.text == "@@@@@@@@"
    assert len(trigger.tokens) == 8
    assert trigger.bits is None
    assert trigger.mark.bits is None
    assert any("no known entropy" in w for w in warnings)
    assert any("no exact bound" in w for w in warnings)


def test_free_choices_are_counted() -> None:
    everything = make_key().watermarks[0]
    # Six of 24 layers, the id, and the width.
    expected = log2(comb(24, 6)) + 6 * log2(30) + log2(60)
    assert everything.free_choice_bits(24) == pytest.approx(expected)
    narrow = LayerPlan(5, 60, 2, tuple(range(50)), "all")
    chosen = make_key(WatermarkRequest(plans=(narrow,), id=0)).watermarks[0]
    # A pool that leaves out ten experts could have been picked to fit: C(60, 10) ways, whatever it is called.
    assert chosen.free_choice_bits(1) > log2(comb(60, 10))


def test_pool_rules() -> None:
    usage = [1.0, 0.1, 5.0, 0.9]
    rule = PoolRule.parse("usage:0.25-2")
    assert rule.name == "usage:0.25-2"
    assert rule.pool(4, usage) == (0, 3)
    assert PoolRule.parse("all").pool(4) == (0, 1, 2, 3)
    assert PoolRule.parse("usage").name == "usage:0.8-4"
    for text in ("usage:2-1", "usage:", "some", "usage:0.25-4;x"):
        with pytest.raises(CapacityError, match="pool rule"):
            PoolRule.parse(text)
    with pytest.raises(CapacityError, match="needs the use"):
        rule.pool(4)
    with pytest.raises(CapacityError, match="none was selected"):
        rule.pool(4, [0.0] * 4)


def test_another_model_is_noticed() -> None:
    facts = paper_model()
    assert facts.mismatches(replace(facts, config_digest="1" * 64)) == []
    assert "expected Qwen2MoeForCausalLM" in facts.mismatches(replace(facts, architecture="Other"))[0]
    assert "24 layers, got 12" in facts.mismatches(paper_model(layers=12))[0]
    assert "first in layer 0" in facts.mismatches(paper_model(experts=64))[0]
    assert "first in layer 23" in facts.mismatches(replace(facts, routed=facts.routed[:-1]))[0]
    assert "tokenizer" in facts.mismatches(replace(facts, tokenizer_digest="1" * 64))[0]


def test_plans_are_checked() -> None:
    for pool, width in (((), 1), ((1, 1), 1), ((0, 9), 1), ((0, 1), 3), ((1, 0), 1)):
        with pytest.raises(CapacityError):
            LayerPlan(0, 8, width, pool, "list")
