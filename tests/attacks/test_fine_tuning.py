"""Fine-tuning: the loss really falls, only what should change changes, one seed gives one result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attack_helpers import QUICK, Count, changed, routers, state

from pathmark.attacks import finetuning
from pathmark.attacks.finetuning import FineTune, fine_tune
from pathmark.attacks.kit import Kit
from pathmark.errors import AttackError
from pathmark.models import (
    pad_rows,
    perplexity,
)
from pathmark.training.text import TextBatches, language_loss


def test_an_epoch_sees_every_row_once_with_little_padding():
    lengths = torch.randint(8, 128, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = TextBatches(lengths, 16, seed=3)
    assert batches.per_epoch == 63
    first = [batches.at(step) for step in range(63)]
    assert sorted(i for batch in first for i in batch) == list(range(1000))
    assert batches.at(63) != first[0]
    assert [batches.at(step) for step in range(63)] == first  # the step alone decides, not what came before
    assert TextBatches(lengths, 16, seed=4).at(0) != first[0]
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in first)
    assert padded < 1.08 * sum(lengths)


def test_the_language_loss_is_the_models_own(model, kit):
    ids_BT, mask_BT = pad_rows(kit.rows(4, 30), 0)
    labels_BT = ids_BT.masked_fill(mask_BT == 0, -100)
    with torch.no_grad():
        own = model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT).loss
        ours = language_loss(model, ids_BT, mask_BT)
    assert torch.allclose(own, ours, atol=1e-5)


def test_fine_tuning_of_all_weights(model, kit):
    before, seen = state(model), []
    told = Count()
    watched = Kit(tokenizer=kit.tokenizer, texts=kit.texts, progress=told)

    def note(epoch, now):
        seen.append((epoch, perplexity(now, rows).value))

    rows = kit.rows(48, 24)
    after = fine_tune(model, FineTune(epochs=3, lr=1e-2, **QUICK), watched, each_epoch=note)
    assert told.stages == [["fine-tuning (all)", 18, 18]]
    assert told.note.startswith("loss ")
    assert [epoch for epoch, _ in seen] == [1, 2, 3]
    assert seen[2][1] < seen[0][1] < 0.8 * perplexity(model, rows).value
    assert perplexity(after, rows).value == pytest.approx(seen[2][1])
    assert changed(model, after) == set(before)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())  # the given model is untouched
    assert all(p.requires_grad for p in after.parameters())


def test_the_same_seed_gives_the_same_weights(mixtral, kit):
    runs = [fine_tune(mixtral, FineTune(epochs=1, seed=seed, **QUICK), kit) for seed in (1, 1, 2)]
    assert not changed(runs[0], runs[1])
    assert changed(runs[0], runs[2])


@pytest.mark.parametrize("train", ["all", "lora"])
def test_interrupted_training_goes_on_to_the_same_weights(mixtral, kit, train, tmp_path, monkeypatch):
    monkeypatch.setattr(finetuning, "CHECKPOINT_EVERY", 6)
    config = FineTune(train=train, epochs=3, **QUICK)
    told = Count()
    kept = replace(kit, unfinished=tmp_path / "unfinished", progress=told)

    def power_cut(epoch, now):
        if epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fine_tune(mixtral, config, kept, each_epoch=power_cut)
    (checkpoint,) = kept.unfinished.iterdir()
    assert checkpoint.stat().st_mode & 0o077 == 0
    epochs = []
    resumed = fine_tune(mixtral, config, kept, each_epoch=lambda epoch, now: epochs.append(epoch))
    assert epochs == [2, 3]  # the first was done
    assert told.stages[-1] == [f"fine-tuning ({train})", 18, 18]
    assert not changed(resumed, fine_tune(mixtral, config, kit))
    assert list(kept.unfinished.iterdir()) == [checkpoint]
    other = fine_tune(resumed, config, kept)  # of other weights: another run, and from its start
    assert len(list(kept.unfinished.iterdir())) == 2
    assert not changed(other, fine_tune(resumed, config, kit))
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(AttackError, match="cannot be read; delete it"):
        fine_tune(mixtral, config, kept)


def test_fine_tuning_of_routers_changes_routers_only(model, kit):
    after = fine_tune(model, FineTune(train="router", epochs=3, **QUICK), kit)
    assert changed(model, after) == routers(model)
    rows = kit.rows(48, 24)
    assert perplexity(after, rows).value < perplexity(model, rows).value


def test_adapters_are_merged_and_touch_routers_and_attention(mixtral, kit):
    rows, seen = kit.rows(48, 24), []
    config = FineTune(train="lora", epochs=2, **QUICK)
    after = fine_tune(mixtral, config, kit, each_epoch=lambda epoch, now: seen.append(state(now)))
    names = changed(mixtral, after)
    assert routers(mixtral) <= names
    assert all("self_attn" in name for name in names - routers(mixtral))
    assert len(names - routers(mixtral)) == 4 * 4  # q, k, v, o
    assert perplexity(after, rows).value < perplexity(mixtral, rows).value
    assert all(torch.equal(seen[1][name], p) for name, p in after.named_parameters())
    assert any(not torch.equal(seen[0][name], p) for name, p in after.named_parameters())
    change = after.get_parameter("model.layers.1.self_attn.q_proj.weight") - mixtral.get_parameter(
        "model.layers.1.self_attn.q_proj.weight"
    )
    assert torch.linalg.matrix_rank(change, rtol=1e-4) <= 8
    assert not changed(after, fine_tune(mixtral, config, kit))


def test_fine_tuning_of_the_bundled_model(bundled, kit):
    rows = kit.rows(48, 24)
    after = fine_tune(bundled, FineTune(epochs=1, lr=7e-4, **QUICK), kit)
    assert perplexity(after, rows).value < perplexity(bundled, rows).value


def test_a_rate_that_breaks_the_model_is_an_error_in_one_line(mixtral, kit):
    with pytest.raises(AttackError, match="try a smaller learning rate") as caught:
        fine_tune(mixtral, FineTune(epochs=3, lr=1e34, **QUICK), kit)
    assert "\n" not in str(caught.value)
