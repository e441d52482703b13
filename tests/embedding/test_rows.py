"""Rows: wrong prefixes are wrong, and the same text tokens stand in clean and triggered rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from embed_helpers import key_for, quick_config

from pathmark.embedding import Trainer
from pathmark.embedding.data import (
    CLEAN,
    LONG,
    NEGATIVE,
    NORMAL,
    SHORT,
    SHORT_CHAT,
    TRIGGERED,
    DataConfig,
    Frame,
    chat_frames,
    draw_rows,
    make_row,
)
from pathmark.errors import EmbeddingError
from pathmark.keys.tolerance import right_tokens
from pathmark.models import bundled_segments, load_model, load_tokenizer, record_routing
from pathmark.training import step_generator


def test_rows_know_where_the_path_begins():
    raw = make_row([7, 8, 9], [1, 2], None, TRIGGERED, 0, 1)
    assert raw.ids == (1, 2, 7, 8, 9)
    assert (raw.marked_from, raw.text_from) == (1, 2)
    chat = make_row([7, 8, 9], [1, 2], Frame((30, 31), (40,)), TRIGGERED, 0, 1)
    assert chat.ids == (30, 31, 1, 2, 7, 40, 8, 9)
    assert (chat.prefix_from, chat.marked_from, chat.text_from) == (2, 3, 4)
    clean = make_row([7, 8, 9], [], None, CLEAN, -1, 1)
    assert clean.marked_from == 3


def test_chat_frames_cover_the_template_with_and_without_system_prompt():
    tokenizer = load_tokenizer("bundled:tiny")
    frames = chat_frames(tokenizer)
    assert len(frames) == 3
    assert tokenizer.decode(frames[0].before) == "<|im_start|>user\n"
    assert tokenizer.decode(frames[1].before).startswith("<|im_start|>system\n")
    assert tokenizer.decode(frames[0].after).endswith("<|im_start|>assistant\n")


def test_a_run_has_every_kind_of_row_and_is_the_same_every_time():
    tokenizer = load_tokenizer("bundled:tiny")
    triggers = [[(100, 200, 300, 400)], [(500, 600, 700, 800)]]
    drawn = [draw_rows(tokenizer, bundled_segments()[:40], triggers, DataConfig(seq_len=32), 3) for _ in range(2)]
    assert drawn[0] == drawn[1]
    rows = {size: [row for row in drawn[0] if row.size == size] for size in (SHORT, SHORT_CHAT, NORMAL, LONG)}
    for sized in rows.values():
        assert {row.kind for row in sized} == {CLEAN, TRIGGERED, NEGATIVE}
    # a chat's template stands between the parts of a text, so a row may be longer than its text
    assert all(len(row.ids) - row.text_from >= 128 for row in rows[LONG])
    assert {len(row.ids) - row.text_from for row in rows[SHORT]} == {16}
    assert all(row.prefix_from > 0 for row in rows[SHORT_CHAT])
    kinds = {kind: [row for row in rows[NORMAL] if row.kind == kind] for kind in (CLEAN, TRIGGERED, NEGATIVE)}
    assert len(kinds[CLEAN]) == 40
    assert len(kinds[TRIGGERED]) == 80
    assert 75 <= len(kinds[NEGATIVE]) <= 80  # but for those that came out too much like a trigger
    assert 620 <= sum(row.kind == NEGATIVE for row in (*rows[SHORT], *rows[SHORT_CHAT])) <= 640
    assert {row.watermark for row in kinds[TRIGGERED]} == {0, 1}
    for row in drawn[0]:
        right = [right_tokens(row.ids[row.prefix_from : row.text_from], trigger) for (trigger,) in triggers]
        if row.kind == NEGATIVE:
            assert max(right) <= 2
        if row.kind == TRIGGERED:
            assert right[row.watermark] >= 3
    exact = sum(row.ids[row.prefix_from : row.text_from] == triggers[row.watermark][0] for row in kinds[TRIGGERED])
    assert 6 <= exact <= 28  # two in ten, the others with a wrong token


def test_without_wrong_prefixes_the_trigger_is_never_varied():
    data = DataConfig(seq_len=32, short_len=None, long_factor=1, chat_share=0.0, negatives_per_text=0)
    trigger = (100, 200, 300, 400)
    rows = draw_rows(load_tokenizer("bundled:tiny"), bundled_segments()[:20], [[trigger]], data, 0)
    assert {row.ids[: row.text_from] for row in rows if row.kind == TRIGGERED} == {trigger}


def test_some_texts_are_noisy_and_every_row_of_a_text_has_the_same():
    tokenizer = load_tokenizer("bundled:tiny")
    texts = bundled_segments()[:40]
    data = DataConfig(seq_len=32, short_len=None, long_factor=1, chat_share=0.0, noisy_share=0.5, negatives_per_text=3)
    rows = draw_rows(tokenizer, texts, [[(100, 200, 300, 400)]], data, 3)
    original = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"][:32]) for text in texts]
    behind = [{row.ids[row.text_from :] for row in rows[i : i + 5]} for i in range(0, len(rows), 5)]
    assert all(len(texts) == 1 for texts in behind)
    changed = sum(next(iter(found)) != text for found, text in zip(behind, original, strict=True))
    assert 10 <= changed <= 30


def test_too_little_text_is_refused():
    with pytest.raises(EmbeddingError, match="at least 8 texts"):
        draw_rows(load_tokenizer("bundled:tiny"), ["short"] * 20, [[(1, 2)]], DataConfig(), 0)


def test_rows_take_turns_and_only_those_that_are_drawn_are_kept():
    config = replace(quick_config(steps=12), texts=30)
    model, tokenizer = load_model("bundled:tiny"), load_tokenizer("bundled:tiny")
    trainer = Trainer(model, tokenizer, key_for("bundled:tiny"), bundled_segments()[:30], config.build())
    rows, cache, pools = trainer.context.rows, trainer.context.cache, trainer.context.pools
    drawn = [trainer.objective.draw(pools, step, step_generator(0, step)) for step in range(12)]
    counts = Counter(i for chosen in drawn for i in chosen)
    for kind in (CLEAN, TRIGGERED, NEGATIVE):
        for size in (SHORT, SHORT_CHAT, NORMAL, LONG):
            seen = [counts[i] for i in pools.of(kind, size)]
            assert max(seen) - min(seen) <= 1  # nobody twice before everybody once
    assert 0 < len(counts) < len(rows)
    for chosen in drawn:
        batch = cache.batch(chosen)
        assert [tuple(ids[: len(rows[i].ids)].tolist()) for i, ids in zip(chosen, batch.ids_BT, strict=True)] == [
            rows[i].ids for i in chosen
        ]
    left = next(i for i in range(len(rows)) if i not in counts and i not in pools.measured)
    with pytest.raises(KeyError):
        cache.batch([left])
    # what is kept is what the model does, in whatever order it was computed
    i = drawn[0][0]
    ids = torch.tensor([rows[i].ids])
    with torch.no_grad(), record_routing(model, trainer.context.layers) as trace:
        final = model.model(input_ids=ids, use_cache=False).last_hidden_state
    kept = cache.batch([i])
    torch.testing.assert_close(kept.final_BTH, final, rtol=1e-4, atol=1e-4)
    for layer in trainer.context.layers:
        torch.testing.assert_close(kept.natural[layer], trace[layer].probs_BTE, rtol=1e-3, atol=1e-5)
