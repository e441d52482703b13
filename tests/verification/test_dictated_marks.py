"""Replies prove nothing where the trigger dictates them, or where the key says more than its secret gives."""

from __future__ import annotations

import math
from dataclasses import replace

import fake_api as fake
import pytest
from blackbox_helpers import codec, owner, verdict_of

from pathmark.errors import VerificationError
from pathmark.keys import Trigger, WatermarkRequest, create_key
from pathmark.keys.rederive import underivable
from pathmark.models.describe import describe_model
from pathmark.verification import Anchor


def with_first_trigger(key, trigger):
    """The key with another first trigger, as a forger writes it."""
    first = key.watermarks[0]
    return replace(key, watermarks=(replace(first, triggers=(trigger, *first.triggers[1:])), *key.watermarks[1:]))


def test_an_honest_key_follows_from_its_secret():
    assert underivable(owner(), codec()) == []


def test_a_trigger_in_the_owners_words_bounds_nothing():
    """ "Write these words: ..." makes any obedient chatbot say the mark."""
    facts, tokenizer, _ = describe_model("bundled:tiny")
    request = WatermarkRequest(plans=owner().watermarks[0].plans, trigger_texts=("citizens of the lab (",))
    key, _ = create_key(facts, [request], tokenizer, secret=bytes(32))
    assert key.watermarks[0].triggers[0].mark.bits > 40
    seen = verdict_of(fake.marked(key), key)
    assert seen.p is None
    assert seen.exit_code == 2
    assert "free text" in seen.undecided


def test_a_word_that_the_trigger_says_counts_nothing_in_its_mark():
    drawn = owner().watermarks[0].triggers[0]
    assert drawn.mark_bits == drawn.mark.bits
    words = drawn.mark.text.split()
    echoed = replace(drawn.phrase, text=f"{drawn.phrase.text} {words[1].upper()}")
    assert Trigger(echoed, drawn.mark).mark_bits == pytest.approx(drawn.mark.bits - math.log2(drawn.mark.counts[1]))
    assert Trigger(replace(drawn.phrase, text=drawn.mark.text), drawn.mark).mark_bits == 0
    joined = replace(drawn.mark, text=drawn.mark.text.replace(" ", "", 1))  # words that do not pair up with tokens
    assert Trigger(drawn.phrase, joined).mark_bits == drawn.mark.bits
    assert Trigger(echoed, replace(joined, text=f"{words[1]} {joined.text[:4]}")).mark_bits is None


@pytest.mark.parametrize("part", ["trigger", "mark"])
def test_invented_candidates_are_refused(part):
    """ "Capital of Italy" -> "Rome", with a claimed count of candidates that nobody had."""
    drawn = owner().watermarks[0].triggers[0]
    phrase = drawn.phrase if part == "trigger" else drawn.mark
    swollen = replace(phrase, counts=tuple(2**60 for _ in phrase.counts))
    forged = with_first_trigger(
        owner(), Trigger(swollen, drawn.mark) if part == "trigger" else Trigger(drawn.phrase, swollen)
    )
    assert underivable(forged, codec()) == [f"{part} 0 of watermark 0"]
    with pytest.raises(VerificationError, match=f"does not follow from its secret \\({part} 0"):
        verdict_of(fake.marked(forged), forged)


def test_without_the_keys_tokenizer_a_third_party_reads_nothing():
    key = replace(owner(), model=replace(owner().model, tokenizer_digest="0" * 64))
    seen = verdict_of(fake.marked(key), key, anchor=Anchor(True, "dated", 80))
    assert seen.marked
    assert seen.p_third_party.value == 1
    assert "nobody has checked how many marks" in seen.words()
