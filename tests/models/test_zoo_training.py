"""The training of small models of the paper's architectures, a few steps of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from pathmark.models import bundled_segments, load_model, load_tokenizer
from pathmark.models.bundled import bundled_folder
from pathmark.models.describe import describe_model

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import train_tiny
import train_zoo
import training_texts

EXPERTS = {"mixtral": (8, 2), "phimoe": (16, 2), "qwen3_moe": (128, 8), "qwen2_moe": (60, 4)}


@pytest.fixture
def few_steps(monkeypatch):
    """Every stage of the training, on a handful of rows."""
    shapes = {"SHORT_SHAPE": (2, 64), "LONG_SHAPE": (1, 96), "ROUTING_SHAPE": (1, 32)}
    counts = {"SHORT_STEPS": 3, "LONG_STEPS": 1, "LEVEL_STEPS": 2, "ROUTING_FROM": 1}
    for name, value in {**shapes, **counts}.items():
        monkeypatch.setattr(train_tiny, name, value)
    documents = [text.split("\n") for text in bundled_segments()[:60]]
    found = ([], documents, load_tokenizer(bundled_folder("bundled:tiny")))
    monkeypatch.setattr(training_texts, "texts", lambda: found)


@pytest.mark.parametrize("name", train_zoo.ZOO)
def test_each_architecture_of_the_paper_is_trained_and_can_be_marked(name, few_steps, tmp_path):
    train_zoo.train_one(name, tmp_path / "zoo", tmp_path / "work")
    folder = tmp_path / "zoo" / name
    _, _, report = describe_model(str(folder))
    assert {(facts.experts, facts.top_k) for facts in report.routed} == {EXPERTS[name]}
    assert len(report.routed) == train_tiny.LAYERS
    assert report.recommended
    model = load_model(folder)
    ids = torch.randint(0, training_texts.VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert model(input_ids=ids).logits.isfinite().all()
    written = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    train_zoo.train_one(name, tmp_path / "zoo", tmp_path / "work")
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == written
