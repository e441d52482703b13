"""Attacks that leave the weights alone: looking for the trigger, and claiming a model with a forged key."""

from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from pathmark.attacks.kit import Kit
from pathmark.attacks.search import TriggerSearch, search_triggers
from pathmark.evaluate.findings import judge_findings
from pathmark.evaluate.forged_papers import Court, forge_papers
from pathmark.evaluate.forged_readings import Scene, forge_readings
from pathmark.evaluate.forgery import (
    Victim,
    choose_freely,
    grind_paths,
    grind_secrets,
    grind_triggers,
    observe_trigger,
)
from pathmark.keys import ModelFacts, OwnerKey, TextCodec, WatermarkRequest, create_key
from pathmark.models import find_routers
from pathmark.progress import Progress
from pathmark.results.robustness import Forged, Search
from pathmark.verification import verify_model

TEXTS = 16
FORGERS_TEXTS, FORGERS_TOKENS, FORGERS_TRIGGERS = 20, 64, 16


@dataclass(frozen=True, kw_only=True)
class ForgersBudget:
    """What forgers try."""

    paths: int = 1_000_000
    """Paths and triggers each."""
    secrets: int = 100
    """Keys."""
    seed: int = 0


def look_for_trigger(
    model: PreTrainedModel, key: OwnerKey, kit: Kit, probes: Sequence[Sequence[int]], config: TriggerSearch
) -> Search:
    """A thief's search with its budget, judged by the owner."""
    result = search_triggers(model, config, kit)
    judged = judge_findings(model, key, result, [tuple(text) for text in probes[:TEXTS]])
    return Search(
        steps=config.steps,
        restarts=config.restarts,
        tried=result.tried,
        tokens=result.tokens,
        gradients=result.gradients,
        seconds=result.seconds,
        complete=result.complete,
        suspicious=len(result.suspicious),
        suspicious_that_fire=judged.suspicious,
        looked_at_that_fire=judged.looked_at,
        kinds_that_fire=tuple(sorted({finding.kind for finding in judged.hits})),
        found=judged.found,
        trigger_itself=judged.itself,
    )


def forge_claims(
    model: PreTrainedModel,
    key: OwnerKey,
    facts: ModelFacts,
    codec: TextCodec,
    probes: Sequence[Sequence[int]],
    budget: ForgersBudget,
    progress: Progress,
) -> list[Forged]:
    """Every way to claim the model without a mark in it; and what a third party makes of it."""
    rng, seed = random.Random(budget.seed), budget.seed
    progress.stage("forged claims", None)
    texts = [tuple(text)[:FORGERS_TOKENS] for text in probes[:FORGERS_TEXTS]]
    layers = [site.layer for site in find_routers(model)]
    prefixes = [tuple(rng.choices(range(3, facts.vocab_size), k=8)) for _ in range(FORGERS_TRIGGERS)]
    victims = [Victim(facts, codec, each) for each in observe_trigger(model, layers, prefixes, texts)]
    marked = key.watermarks[0].layers
    ground, thief = grind_secrets(victims[0], marked, count=budget.secrets, seed=seed)
    today = datetime.datetime.now(datetime.UTC).date()
    published, seen = today - datetime.timedelta(days=30), today - datetime.timedelta(days=60)
    court = Court(key, thief, verify_model(model, key, texts).p, seen, published, today)
    mine, _ = create_key(
        facts, [WatermarkRequest(plans=victims[0].plans(marked, 2))], codec, owner="forger", secret=rng.randbytes(32)
    )
    (own,) = observe_trigger(model, layers, [mine.watermarks[0].triggers[0].tokens], texts)
    scene = Scene(model, Victim(facts, codec, own), mine, codec, texts)
    forged = [
        grind_paths(victims[0], marked, count=budget.paths, seed=seed),
        ground,
        grind_triggers(victims, marked, count=budget.paths, seed=seed),
        choose_freely(victims[0], seed=seed)[0],
        *forge_papers(court),
        *forge_readings(scene),
    ]
    return [Forged(**each.summary()) for each in forged]
