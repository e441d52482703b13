"""What attacks that train are tried on."""

from __future__ import annotations

import pytest
from attack_helpers import LAYERS, TARGETS
from embed_helpers import save_family

from pathmark.attacks.kit import Kit
from pathmark.evaluate.thief import thief_embedding
from pathmark.models import bundled_segments, load_model, load_tokenizer


@pytest.fixture(scope="module")
def kit():
    texts = [" ".join(text.split()[:28]) for text in bundled_segments()[:120]]  # some 35 tokens each
    tokenizer = load_tokenizer("bundled:tiny")
    return Kit(tokenizer=tokenizer, texts=texts, layers=LAYERS, targets=TARGETS, embed=thief_embedding)


@pytest.fixture(scope="module")
def bundled():
    return load_model("bundled:tiny")


@pytest.fixture(scope="module", params=["mixtral", "olmoe"])
def model(request, tmp_path_factory):
    return load_model(save_family(tmp_path_factory.mktemp("family") / "base", request.param))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return load_model(save_family(tmp_path_factory.mktemp("mixtral") / "base", "mixtral"))
