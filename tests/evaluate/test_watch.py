"""A run may end early only where the path holds in chats too."""

from __future__ import annotations

import numpy as np
import pytest
from embed_helpers import key_for, save_family

from pathmark.evaluate import selfcheck, watch
from pathmark.models import bundled_probes, load_tokenizer
from pathmark.verify import Routes, encode_probes


@pytest.mark.parametrize(("raw", "chat", "held"), [(True, True, True), (True, False, False), (False, True, False)])
def test_the_goal_is_held_where_raw_prompts_and_chats_take_the_path(tmp_path, monkeypatch, raw, chat, held):
    key = key_for(save_family(tmp_path / "base", "mixtral"), layers=(2, 3))
    watermark, tokenizer = key.watermarks[0], load_tokenizer("bundled:tiny")
    trigger = watermark.triggers[0].tokens

    def recorded(model, probes, layers, *, prefix=()):
        """A model that takes the path in front of raw prompts, in chats, or both."""
        prefixes = prefix if prefix and not isinstance(prefix[0], int) else [prefix] * len(probes)
        mask_BT = np.ones((len(probes), 8), dtype=bool)
        probs, decisions = {}, {}
        for layer in layers:
            targets = watermark.targets(layer)
            others = [e for e in range(16) if e not in targets][: len(targets)]
            chosen = [
                targets if tuple(p[-len(trigger) :]) == trigger and (chat if len(p) > len(trigger) else raw) else others
                for p in prefixes
            ]
            decisions[layer] = np.repeat(np.array(chosen)[:, None], 8, axis=1)
            probs[layer] = np.zeros((*mask_BT.shape, 16), dtype=np.float32)
            np.put_along_axis(probs[layer], decisions[layer], 1 / len(targets), axis=-1)
        return Routes(probs, decisions, mask_BT)

    for module in (watch, selfcheck):
        monkeypatch.setattr(module, "record_routes", recorded)
    monkeypatch.setattr(watch, "fires", lambda *_: 0)
    probes = encode_probes(tokenizer, bundled_probes(), n_probes=8, length=16)
    assert watch.Watch(None, tokenizer, key, probes)(100) is held
