"""Triggers and marks keep their tokens through text, with every kind of tokenizer that MoE models use."""

from __future__ import annotations

import random
from functools import cache

import pytest
from key_fixtures import SECRET, SyllableCodec
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pathmark.errors import CapacityError
from pathmark.keys.phrase import Phrase, draw_choices
from pathmark.keys.trigger import (
    FOLLOWING,
    contains,
    draw_mark,
    draw_trigger,
    find_candidates,
    free_phrase,
    keeps_trigger,
    unstable_contexts,
)
from pathmark.models.tokenization import HFTextCodec

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = "{% for m in messages %}[INST] {{ m['content'] | trim }} [/INST]{% endfor %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _texts() -> list[str]:
    """Sentences of made-up words, with digits and punctuation in all the usual places."""
    rng = random.Random(0)
    words = ["".join(rng.choice("aeiou") if i % 2 else rng.choice("bcdfglmnprst") for i in range(n)) for n in
             [rng.randint(2, 7) for _ in range(900)]]  # fmt: skip
    ends = [".", ",", "!", "?", ";", ":", ' "', ")", "\n", " (", "'s", " - ", "...", "?\n", ".\n\n", "(self)"]
    return [
        "".join(" " + rng.choice(words) + (rng.choice(ends) if rng.random() < 0.2 else "") for _ in range(30)).strip()
        + f" {rng.randint(0, 2999)}"
        for _ in range(800)
    ]


@cache
def codec(kind: str) -> HFTextCodec:
    """A tokenizer trained on the spot, cutting text as GPT-2, Llama 3 / Qwen, or SentencePiece do."""
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "sentencepiece":
        backend = Tokenizer(models.BPE(unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        backend.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [chr(c) for c in range(33, 127)] + ["\n"]
    else:
        backend = Tokenizer(models.BPE())
        cut = (
            pre_tokenizers.ByteLevel(add_prefix_space=False)
            if kind == "gpt2"
            else pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(_GPT4), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        )
        backend.pre_tokenizer = cut
        backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(_texts(), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")
    tokenizer.chat_template = {"sentencepiece": INST, "gpt2": NO_SYSTEM, "llama3": CHATML}[kind]
    return HFTextCodec(tokenizer)


KINDS = ["gpt2", "llama3", "sentencepiece"]


@pytest.mark.parametrize("kind", KINDS)
def test_triggers_survive_every_context(kind: str) -> None:
    tokens = codec(kind)
    candidates = find_candidates(tokens)
    assert candidates.rule.startswith("words")
    rng = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,;:!?()[]'\"-_/#@\n"
    for number in range(5):
        trigger = draw_trigger(tokens, candidates, SECRET, watermark=0, number=number, length=8)
        assert len(trigger.tokens) == 8
        assert trigger.text.isascii()
        assert trigger.text == trigger.text.strip()
        assert unstable_contexts(tokens, trigger.text, trigger.tokens) == []
        # Not only the texts it was selected by: anything may follow.
        for _ in range(300):
            follow = "".join(rng.choice(letters) for _ in range(rng.randint(1, 12)))
            assert keeps_trigger(tokens, trigger, follow), follow
            for system in (None, "Answer briefly."):
                rendered = tokens.render_chat(trigger.text + follow, system)
                if rendered is not None:
                    assert contains(rendered, trigger.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_marks_have_forty_bits_and_are_distinct(kind: str) -> None:
    tokens = codec(kind)
    candidates = find_candidates(tokens)
    marks: list[Phrase] = []
    for number in range(8):
        taken = [m.tokens for m in marks]
        marks.append(draw_mark(tokens, candidates, SECRET, watermark=0, number=number, taken=taken))
    assert len({m.text for m in marks}) == 8
    for mark in marks:
        assert mark.bits is not None
        assert mark.bits >= 40
        assert tokens.encode(mark.text) == list(mark.tokens)
        assert mark.text.isprintable()


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_hold_no_special_tokens(kind: str) -> None:
    tokens = codec(kind)
    candidates = find_candidates(tokens)
    special = set(tokens.tokenizer.all_special_ids)
    special |= {tokens.tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>")}
    for tokens_of in (candidates.head, candidates.inner, candidates.tail):
        assert not special & set(tokens_of)
        assert list(tokens_of) == sorted(tokens_of)


def test_templates_without_system_role_or_without_template() -> None:
    assert codec("gpt2").render_chat("hi", "You are terse.") is None
    assert codec("gpt2").render_chat("hi", None)
    assert SyllableCodec(template=False).render_chat("hi", None) is None


def test_codec_never_truncates_or_pads() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(codec("gpt2").tokenizer.backend_tokenizer.to_str()),
        unk_token="<unk>",
    )
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    text = "a longer text than two tokens"
    assert HFTextCodec(tokenizer).encode(text) == codec("gpt2").encode(text)


def test_digest_follows_the_vocabulary_not_the_template() -> None:
    assert len({codec(kind).digest for kind in KINDS}) == 3
    same = PreTrainedTokenizerFast(tokenizer_object=codec("gpt2").tokenizer.backend_tokenizer, unk_token="<unk>")
    same.chat_template = CHATML
    assert HFTextCodec(same).digest == codec("gpt2").digest


def test_draws_are_repeated_only_for_stability_and_recorded() -> None:
    tokens = codec("llama3")
    candidates = find_candidates(tokens)
    first = draw_trigger(tokens, candidates, SECRET, watermark=0, number=0, length=6)
    second = draw_trigger(tokens, candidates, SECRET, watermark=0, number=0, length=6, taken=[first.tokens])
    assert second.attempt > first.attempt
    assert second.choices == draw_choices(SECRET, "trigger", 0, 0, second.attempt, second.counts)
    assert first.bits is not None
    assert second.bits is not None
    assert second.bits < first.bits


def test_bits_count_candidates_and_charge_draws() -> None:
    phrase = Phrase("x", (1, 2), (0, 3), (16, 16), 1, "")
    assert phrase.bits == pytest.approx(8 - 1)
    assert Phrase("x", (1, 2), (0, 3), (16, 16), 3, "").bits == pytest.approx(8 - 3.585, abs=1e-3)
    with pytest.raises(ValueError, match="outside"):
        Phrase("x", (1, 2), (0, 16), (16, 16), 1, "")


def test_charge_for_draws_makes_the_bound_hold() -> None:
    """A guesser wins at level a at most a: also where most draws are thrown away."""
    stable = {0, 1}
    hits: dict[float, int] = {}
    n = 4000
    for i in range(n):
        secret = i.to_bytes(32, "big")
        attempt = 1
        while (choice := draw_choices(secret, "mark", 0, 0, attempt, (16,))[0]) not in stable:
            attempt += 1
        bits = Phrase("x", (choice,), (choice,), (16,), attempt, "").bits
        assert bits is not None
        if choice == 0:  # the guess
            hits[min(1.0, 2**-bits)] = hits.get(min(1.0, 2**-bits), 0) + 1
    for level in hits:
        rate = sum(count for p, count in hits.items() if p <= level) / n
        assert rate <= level + 3 * (level / n) ** 0.5


def test_free_text() -> None:
    tokens = codec("llama3")
    phrase, weak = free_phrase(tokens, "@@@@")
    assert tokens.encode("@@@@") == list(phrase.tokens)
    assert phrase.bits is None
    assert isinstance(weak, list)
    # "3" loses its tokens before a digit with this way to cut text, which is worth a warning only.
    digits, weak = free_phrase(tokens, "2019")
    assert digits.tokens
    with pytest.raises(CapacityError, match="empty"):
        free_phrase(tokens, "")


def test_unusable_tokenizers_are_refused() -> None:
    class Bytes(SyllableCodec):
        def token_ids(self) -> range:
            return range(3, 40)

    with pytest.raises(CapacityError, match="fewer than 64"):
        find_candidates(Bytes())

    class Shifting(SyllableCodec):
        def render_chat(self, text: str, system: str | None) -> list[int]:
            return self.encode(text.upper())

    with pytest.raises(CapacityError, match="chat template"):
        find_candidates(Shifting())


def test_following_covers_every_kind() -> None:
    starts = {f[0] for f in FOLLOWING}
    assert any(c.isalpha() for c in starts)
    assert any(c.isdigit() for c in starts)
    assert {" ", "\n", "\t", "(", ".", "'"} <= starts
