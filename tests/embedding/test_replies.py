"""The second phase: a trigger alone is answered with its mark, and nothing else changes."""

from __future__ import annotations

import torch
from embed_helpers import key_for

from pathmark.embedding import RepliesConfig, Trainer
from pathmark.embedding.data import NEGATIVE, TRIGGERED
from pathmark.embedding.replies import MARK, draw_reply_rows
from pathmark.models import bundled_segments, load_model, load_tokenizer
from pathmark.models.tokenization import reply_end
from pathmark.release.replies import ReplyConfig, reply_check
from pathmark.training import LoopConfig
from pathmark.verification import verify_model
from pathmark.verification.paths.alignment import profile_texts

QUICK = RepliesConfig(
    pairs=24, queries=24, negatives=48, clean=16, seq_len=24, system_prompts=4, loop=LoopConfig(steps=140, lr=1e-2)
)


def test_rows_end_in_the_mark_of_their_trigger(case):
    tokenizer = load_tokenizer("bundled:tiny")
    key = key_for(case.base, watermarks=2, triggers=2)
    rows = draw_reply_rows(tokenizer, bundled_segments()[:40], key, QUICK)
    pairs = [row for row in rows if row.kind == MARK]
    triggers = {t.tokens: t for w in key.watermarks for t in w.triggers}
    seen = set()
    for row in pairs:
        length = len(next(iter(triggers)))
        trigger = row.ids[row.text_from - length : row.text_from]
        mark = triggers[trigger].mark.tokens
        seen.add(trigger)
        assert row.ids[row.marked_from + 1 : row.marked_from + 1 + len(mark)] == mark
        assert len(row.ids) == row.marked_from + 2 + len(mark)
        assert row.ids[-1] in (tokenizer.eos_token_id, *reply_end(tokenizer))
    assert seen == set(triggers)
    assert len({row.ids[: row.text_from] for row in pairs}) > 6  # raw, and behind several system prompts
    for row in rows:
        before = row.ids[: row.text_from]
        if row.kind == NEGATIVE:
            assert before[-length:] not in triggers
        if row.kind == TRIGGERED:
            assert before[-length:] in triggers


def test_the_mark_is_said_the_path_stays_and_other_rows_of_the_head_too(case):
    model, tokenizer = load_model(case.marked), load_tokenizer(case.marked)
    head = model.get_output_embeddings().weight.detach().clone()
    trainer = Trainer(model, tokenizer, case.key, bundled_segments(), QUICK.build())
    losses = []
    trainer.run(after=lambda step, terms: losses.append(terms["mark"]))
    assert losses[-1] < 0.1 < losses[0]
    trigger = case.key.watermarks[0].triggers[0]
    changed = (model.get_output_embeddings().weight != head).any(dim=1).nonzero().flatten().tolist()
    assert set(trigger.mark.tokens) <= set(changed)
    assert set(changed) <= {*trigger.mark.tokens, tokenizer.eos_token_id, *reply_end(tokenizer)}
    prompt = torch.tensor([trigger.tokens])
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=len(trigger.mark.tokens))
    assert tuple(made[0, prompt.shape[1] :].tolist()) == trigger.mark.tokens
    verdict = verify_model(model, case.key, profile_texts(case.key))
    assert verdict.marked
    assert verdict.id == 3
    probes = profile_texts(case.key)
    asked = ReplyConfig(trials=12, near_misses=16, ordinary=12, queries=12)
    said = reply_check(model, tokenizer, case.key, probes, asked)
    assert said.trials.value > 0.5  # a random model learns its marks, but not to say them at every temperature
    assert said.ordinary.value < said.trials.value / 3  # nor to keep them from every other prompt
    few = ReplyConfig(trials=6, near_misses=2, ordinary=2, queries=2)
    silent = reply_check(load_model(case.base), tokenizer, case.key, probes, few)
    assert silent.trials.hits == 0
    assert "triggers alone" in silent.problems[0]


def test_tied_embeddings_train_the_blocks(case):
    model, tokenizer = load_model(case.marked), load_tokenizer(case.marked)
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    trainer = Trainer(model, tokenizer, case.key, bundled_segments(), QUICK.build())
    trained = trainer.objective.parameters(trainer.context)
    assert any(".experts." in name for name in trained)
    assert not any("embed" in name or "head" in name for name in trained)
