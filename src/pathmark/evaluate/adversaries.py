"""Attacks that leave the weights alone: looking for the trigger, and claiming a model with a forged key."""

from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from pathmark.attacks.kit import Kit
from pathmark.attacks.search import TriggerSearch, search_triggers
from pathmark.evaluate.findings import judge_findings
from pathmark.evaluate.forgery import (
    Victim,
    choose_freely,
    grind_paths,
    grind_secrets,
    grind_triggers,
    observe_trigger,
    replay_claims,
)
from pathmark.keys import ModelFacts, OwnerKey, TextCodec
from pathmark.models import find_routers
from pathmark.progress import Progress
from pathmark.verification import verify_model

TEXTS = 16
FORGERS_TEXTS, FORGERS_TOKENS, FORGERS_TRIGGERS = 20, 64, 16


def look_for_trigger(
    model: PreTrainedModel, key: OwnerKey, kit: Kit, probes: Sequence[Sequence[int]], config: TriggerSearch
) -> dict[str, Any]:
    """A thief's search with its budget, judged by the owner. Counts only: a prefix that works is the secret."""
    result = search_triggers(model, config, kit)
    judged = judge_findings(model, key, result, [tuple(text) for text in probes[:TEXTS]])
    return {
        "steps": config.steps,
        "restarts": config.restarts,
        "tried": result.tried,
        "tokens": result.tokens,
        "gradients": result.gradients,
        "seconds": result.seconds,
        "complete": result.complete,
        "suspicious": len(result.suspicious),
        "suspicious_that_fire": None if judged.suspicious is None else judged.suspicious.summary(),
        "looked_at_that_fire": judged.looked_at.summary(),
        "kinds_that_fire": sorted({finding.kind for finding in judged.hits}),
        "found": judged.found,
        "trigger_itself": judged.itself,
    }


def forge_claims(
    model: PreTrainedModel,
    key: OwnerKey,
    facts: ModelFacts,
    codec: TextCodec,
    probes: Sequence[Sequence[int]],
    *,
    paths: int = 1_000_000,
    secrets: int = 100,
    seed: int = 0,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Every way to claim the model with a key that was made after it was seen; and what a third party makes of it."""
    rng = random.Random(seed)
    progress.stage("forged claims", None)
    texts = [tuple(text)[:FORGERS_TOKENS] for text in probes[:FORGERS_TEXTS]]
    layers = [site.layer for site in find_routers(model)]
    prefixes = [tuple(rng.choices(range(3, facts.vocab_size), k=8)) for _ in range(FORGERS_TRIGGERS)]
    victims = [Victim(facts, codec, each) for each in observe_trigger(model, layers, prefixes, texts)]
    marked = key.watermarks[0].layers
    ground, thief = grind_secrets(victims[0], marked, count=secrets, seed=seed)
    today = datetime.datetime.now(datetime.UTC).date()
    published, seen = today - datetime.timedelta(days=30), today - datetime.timedelta(days=60)
    p = verify_model(model, key, texts).p
    forged = [
        grind_paths(victims[0], marked, count=paths, seed=seed),
        ground,
        grind_triggers(victims, marked, count=paths, seed=seed),
        choose_freely(victims[0], seed=seed)[0],
        *replay_claims(key, thief, p, seen=seen, published=published, today=today),
    ]
    return [each.summary() for each in forged]
