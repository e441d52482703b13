"""What a marking is asked for, and what it says in the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_selfcheck import SOUND, checked

from pathmark.embedding import RepliesConfig, default_config
from pathmark.models.checkpoint import Written
from pathmark.release import Marked, MarkingConfig


def test_a_marking_puts_in_paths_or_replies_or_both():
    with pytest.raises(ValueError, match="nothing to do"):
        MarkingConfig(embedding=None)
    config = default_config()
    short = replace(config, data=replace(config.data, seq_len=64))
    both = MarkingConfig(embedding=short, replies=RepliesConfig(seq_len=32))
    assert both.probe_tokens == 64
    assert replace(both, embedding=None).probe_tokens == 32


def test_words_say_whether_it_is_fit_what_it_costs_and_what_was_written():
    check = checked(n_probes=100)
    marked = Marked(
        Path("out"), check, key=None, steps=300, changed=24,
        written=Written(2_000_000, 5_000_000, 90_000_000), seconds=1.0, embed_seconds=1.0,
    )  # fmt: skip
    assert marked.words() == (
        "The copy is fit for release. On 100 held-out texts the mark changes the perplexity of clean text by +1.40 % "
        "(50.00 to 50.70). 24 tensors changed in 300 steps; written to out (5.0 MB written, 2.0 MB of them "
        "changed, 90 MB shared with the original)."
    )
    broken = replace(marked, check=checked(n_probes=100, id=SOUND["id"] + 1))
    assert broken.words().startswith("The copy is not fit for release: id read from the routing: 8, expected 7. On ")
