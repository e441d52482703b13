"""The trainer around any objective: how long it runs, what it refuses, what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from embed_helpers import key_for, quick_config

from pathmark.embedding import RepliesConfig, Trainer, default_config, embed_key
from pathmark.embedding.data import TRIGGERED
from pathmark.errors import CheckpointError
from pathmark.models import bundled_segments, load_model, load_tokenizer
from pathmark.training import LoopConfig, step_generator

TEXTS = bundled_segments()[:12]
TINY = RepliesConfig(
    pairs=8, queries=8, negatives=8, clean=8, seq_len=24, system_prompts=2, loop=LoopConfig(steps=2, lr=1e-3)
)


def quick(name):
    """Few rows and steps of an objective."""
    config = default_config(name)
    data = replace(config.data, seq_len=32, short_len=None, long_factor=1)
    return replace(config, data=data, texts=12, batch_size=6, loop=replace(config.loop, steps=2, seed=2))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bundled:tiny")


@pytest.fixture(scope="module")
def key():
    return key_for("bundled:tiny")


@pytest.mark.parametrize("name", ["anchored", "paper"])
def test_an_epoch_is_a_pass_over_the_triggered_rows(tokenizer, key, name):
    trainer = Trainer(load_model("bundled:tiny"), tokenizer, key, TEXTS, quick(name).build(), epochs=3)
    context = trainer.context
    rows = sum(row.kind == TRIGGERED for row in context.rows)
    assert rows >= 12
    drawn = [
        sum(context.rows[i].kind == TRIGGERED for i in trainer.objective.draw(context.pools, n, step_generator(2, n)))
        for n in range(context.loop.steps)
    ]
    assert sum(drawn[:-1]) < 3 * rows <= sum(drawn)
    assert len(context.cache.batch(range(len(context.rows))).ids_BT) == len(context.rows)  # all of them are kept


@pytest.mark.parametrize("config", [quick("anchored"), quick("paper"), TINY], ids=["anchored", "paper", "replies"])
def test_a_checkpoint_of_another_base_is_refused(tokenizer, key, config, tmp_path):
    """Same key, texts and settings, but other weights to start from: what was learnt there does not fit here."""
    path = tmp_path / "new" / "run.pt"
    first = load_model("bundled:tiny")
    Trainer(first, tokenizer, key, TEXTS, config.build()).run(checkpoint=path)
    again = load_model("bundled:tiny")
    done = Trainer(again, tokenizer, key, TEXTS, config.build()).run(checkpoint=path, resume=True)
    assert done.steps == 2
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters(), strict=True))
    other = load_model("bundled:tiny")
    with torch.no_grad():  # far below what is trained: nothing else would notice
        other.get_input_embeddings().weight[5].mul_(1.01)
    trainer = Trainer(other, tokenizer, key, TEXTS, config.build())
    with pytest.raises(CheckpointError, match="belongs to another run"):
        trainer.run(checkpoint=path, resume=True)


def test_adapters_leave_the_same_model_behind(tokenizer, key, tmp_path):
    config = replace(quick_config(steps=3, data={"short_len": None, "long_factor": 1}), texts=12, train="lora")
    model = load_model("bundled:tiny")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    path = tmp_path / "run.pt"
    assert embed_key(model, tokenizer, key, TEXTS, config, checkpoint=path) == 3
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert any(not torch.equal(p, before[name]) for name, p in after.items())
    # each process draws its adapters anew; the checkpoint still fits, and brings those of the run
    torch.manual_seed(99)
    again = load_model("bundled:tiny")
    assert embed_key(again, tokenizer, key, TEXTS, config, checkpoint=path, resume=True) == 3
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_another_id_gets_what_the_routers_have_learnt_and_leaves_nothing_behind(tokenizer, key):
    first, layers = key.watermarks[0], key.layers
    same = [True] + [False] * (len(layers) - 1)  # targets in the first layer only
    number = next(
        n for n in range(first.capacity) if [first.targets_for(n)[i] == first.path[i] for i in layers] == same
    )
    other, model = key.with_id(number), load_model("bundled:tiny")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Trainer(model, tokenizer, key, TEXTS, quick("anchored").build())
    trainer.run()
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.turn_to(other, LoopConfig(steps=1, lr=1e-3))
    for site in trainer.context.sites:
        old, new = (list(k.watermarks[0].path[site.layer]) for k in (key, other))
        learnt = trained[site.weight_name] - before[site.weight_name]
        now = site.weight - before[site.weight_name]
        assert float(learnt[old].abs().max()) > 0
        torch.testing.assert_close(now[new], learnt[old])
        torch.testing.assert_close(now[old], learnt[new])
        experts = [n for n in before if n.startswith(f"{site.name.rpartition('.')[0]}.experts.")]
        assert experts
        for name in experts:
            assert not torch.equal(trained[name][old], before[name][old])
            assert torch.equal(dict(model.named_parameters())[name], before[name])
    trainer.run()
    changed = model.get_parameter(experts[0])
    assert not torch.equal(changed[new], before[experts[0]][new])
    assert torch.equal(changed[old], before[experts[0]][old])
