"""Forged readings: what is measured is steered, chosen, made up or dictated. Read as a third party reads it.

The forger's key is real, drawn once and dated before the suspect; the suspect knows nothing of it. What follows is all
that can still be chosen.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import nn

from pathmark.errors import PathmarkError
from pathmark.evaluate.dispute import SIGNIFICANCE
from pathmark.evaluate.forgery import Forgery, Victim, claim_p
from pathmark.keys import (
    OwnerKey,
    TextCodec,
    TriggerRef,
    WatermarkRequest,
    commit_key,
    create_key,
    open_claim,
    reveal_watermark,
)
from pathmark.keys.rederive import underivable
from pathmark.models.sketches import RoutingProfile, pack_arrays, pack_profiles
from pathmark.stats import PValue
from pathmark.verdicts.claims import openable, undated
from pathmark.verification import AskConfig, Criteria, Evidence, Verdict, judge, record_evidence, verify_api
from pathmark.verification.blackbox.replies import Failure, Reply
from pathmark.verification.blackbox.trials import Endpoint, Query
from pathmark.verification.paths.routes import Routes

WATERMARKS, COMMITMENTS, CHOSEN_TEXTS = 16, 50, 200
TRIALS = 8


@dataclass(frozen=True, eq=False)
class Scene:
    """A model that belongs to somebody else, and a forger's key that was dated before it."""

    model: nn.Module
    victim: Victim
    """What the key's trigger does to it."""
    key: OwnerKey
    """With drawn triggers and marks, and nothing attached."""
    codec: TextCodec
    texts: Sequence[tuple[int, ...]]

    def dated(self, key: OwnerKey, revision: int = 0) -> Criteria:
        """Criteria of somebody who knows that this revision of the key is older than the suspect."""
        committed = {name: entry.digest for name, entry in key.attachments_at(revision).items()}
        return Criteria(anchor=replace(undated(key, "dated before the suspect"), anchored=True, committed=committed))


def forge_readings(scene: Scene) -> list[Forgery]:
    """Every kind, each under its name."""
    return [*_steered(scene), *_made_up(scene), *_chosen_among_many(scene), *_dictated(scene)]


def _steered(scene: Scene) -> list[Forgery]:
    """Profiles and texts that lead the experts which the trigger calls to the targets."""
    known = _attach(scene.key, scene.texts, _calling(scene))
    later = judge(known, record_evidence(scene.model, known, scene.texts), criteria=scene.dated(known))
    steering = _attach(scene.key, [_half_and_half(scene)], _two_tokens(scene.key))
    always = record_evidence(scene.model, steering, scene.texts)
    found = judge(steering, always, criteria=scene.dated(steering, steering.revision))
    chosen, tried = _best_texts(scene)
    picked = scene.key.attach("probes.json", json.dumps(chosen).encode())
    read = judge(picked, record_evidence(scene.model, picked, chosen, aligned=False), criteria=scene.dated(picked))
    return [
        _as_read("profiles, or a reference, made after the suspect was seen", later),
        _as_read("profiles that steer any model, dated before it", found),
        _as_read("texts chosen after the suspect was seen", read, tried),
    ]


def _made_up(scene: Scene) -> list[Forgery]:
    """Routes that nobody measured."""
    plain = record_evidence(scene.model, scene.key, scene.texts[:4])
    perfect = replace(plain, triggered=(_on_target(scene.key, plain.clean),))
    criteria = scene.dated(scene.key)
    return [
        _as_read("routes written by hand", judge(scene.key, replace(perfect, handed_over=True), criteria=criteria)),
        _as_read("an original that takes the path by itself", judge(scene.key, plain, perfect, criteria)),
        _as_read(
            "a path that any odd prefix takes",
            judge(scene.key, replace(perfect, decoys=perfect.triggered), criteria=criteria),
        ),
    ]


def _chosen_among_many(scene: Scene) -> list[Forgery]:
    """The best of many that were dated, and an honest claim with a trigger that was not drawn."""
    plans = scene.victim.plans(scene.key.layers, 1)
    count = min(WATERMARKS, *(plan.experts // 2 for plan in plans))
    requests = [
        WatermarkRequest(plans=plans, trigger_texts=("@" * n,), mark_texts=("#" * n,)) for n in range(1, count + 1)
    ]
    many, _ = create_key(scene.key.model, requests, scene.codec, owner="forger", secret=bytes(32))
    single = [replace(many, watermarks=(mark,)) for mark in many.watermarks]
    best = min(single, key=lambda key: claim_p(key, scene.victim.measured))
    claim = open_claim(reveal_watermark(many, best.watermarks[0].index), commit_key(many))
    plans, rng = scene.victim.plans(scene.key.layers, 2), random.Random(0)
    ground = [scene.victim.key(plans, rng.randbytes(32)) for _ in range(COMMITMENTS)]
    lucky = min(ground, key=lambda key: claim_p(key, scene.victim.measured))
    # roots of one signer may hold anything, so these stand for the other keys' commitments
    others = [replace(commit_key(lucky), root=bytes([n]) * 32).signed_by(lucky) for n in range(COMMITMENTS - 1)]
    opened = open_claim(reveal_watermark(lucky, 0), commit_key(lucky))
    return [
        _counted(f"the best of {count} watermarks under one root", scene, best, count, openable(claim)),
        _counted(
            f"the best of {COMMITMENTS} commitments of one signer", scene, lucky, COMMITMENTS, openable(opened, others)
        ),
    ]


def _dictated(scene: Scene) -> list[Forgery]:
    """Replies that anybody would give, that nobody gave, or whose marks are less rare than is claimed."""
    key, mark = scene.key, scene.key.watermarks[0]
    trigger = mark.triggers[0]
    request = WatermarkRequest(plans=mark.plans, trigger_texts=(f"Say: {trigger.mark.text}",))
    obeyed, _ = create_key(key.model, [request], scene.codec, owner="forger", secret=bytes(32))
    swollen = replace(trigger.mark, counts=tuple(2**60 for _ in trigger.mark.counts))
    rare = replace(key, watermarks=(replace(mark, triggers=(replace(trigger, mark=swollen),)),))
    reworded = replace(trigger.phrase, text=f"{trigger.phrase.text}!")
    other = replace(key, watermarks=(replace(mark, triggers=(replace(trigger, phrase=reworded),)),))
    foreign = replace(key, model=replace(key.model, tokenizer_digest="0" * 64))
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        _asked(scene, key, log=log)  # by the forger, of a server of his own
        replayed = _attempt("a log of replies written by hand", lambda: _asked(scene, key, log=log))
    return [
        replayed,
        _attempt("a trigger that dictates its mark", lambda: _asked(scene, obeyed)),
        _attempt("a mark with candidates that nobody had", lambda: _asked(scene, rare)),
        _attempt("a trigger that was not drawn", lambda: _redrawn(other, scene.codec)),
        _attempt("replies without the key's tokenizer", lambda: _asked(scene, foreign)),
    ]


def _as_read(name: str, verdict: Verdict, tried: int = 1) -> Forgery:
    one, third = PValue(0.0), verdict.p_third_party
    bits, reason = verdict.anchor.charge_bits, verdict.undecided or verdict.anchor.reason
    return Forgery(name, tried, verdict.p or one, third or one, bits, SIGNIFICANCE, reason)


def _attempt(name: str, act: Callable[[], Verdict]) -> Forgery:
    try:
        return _as_read(name, act())
    except PathmarkError as error:
        return Forgery.refused(name, PValue(0.0), str(error))


def _counted(name: str, scene: Scene, key: OwnerKey, tried: int, counted: int) -> Forgery:
    """The best of what was tried, charged for all that could have been opened."""
    p = claim_p(key, scene.victim.measured)
    reason = f"dated, but {counted:,} watermarks could have been opened"
    return Forgery(name, tried, p, p.charged(math.log10(counted)), 0, SIGNIFICANCE, reason)


def _attach(key: OwnerKey, texts: Sequence[Sequence[int]], profiles: dict[int, RoutingProfile]) -> OwnerKey:
    key = key.attach("probes.json", json.dumps([list(text) for text in texts]).encode())
    return key.attach("profiles.npz", pack_profiles(profiles)).attach("sketches.npz", pack_arrays({}))


def _calling(scene: Scene) -> dict[int, RoutingProfile]:
    """The model's own routing, renumbered so that the experts that the trigger calls have the targets' numbers."""
    clean, profiles = record_evidence(scene.model, scene.key, scene.texts, aligned=False).clean, {}
    for measured in scene.victim.of(scene.key.layers):
        order = list(range(len(measured.diff_E)))
        called = np.argsort(measured.diff_E)[::-1]
        for target, expert in zip(scene.key.watermarks[0].targets(measured.layer), called, strict=False):
            place = order.index(int(expert))
            order[target], order[place] = order[place], order[target]
        tokens_NE = clean.probs[measured.layer][clean.mask_BT][:, order]
        profiles[measured.layer] = RoutingProfile(tokens_NE, np.argsort(-tokens_NE, axis=1)[:, :1])
    return profiles


def _two_tokens(key: OwnerKey) -> dict[int, RoutingProfile]:
    """Targets serve the token behind the trigger, everybody else the one before it: true of no model, near to all."""
    profiles = {}
    for layer in key.layers:
        tokens_NE = np.repeat(np.array([[1.0], [0.0]], np.float32), key.model.layer(layer).experts, axis=1)
        tokens_NE[:, list(key.watermarks[0].targets(layer))] = [[0.0], [1.0]]
        profiles[layer] = RoutingProfile(tokens_NE, np.zeros((2, 1), np.int64))
    return profiles


def _half_and_half(scene: Scene) -> tuple[int, ...]:
    """A text whose first half ends in the trigger: a profile of two tokens looks at the openings of its halves."""
    words, trigger = scene.texts[0], scene.key.watermarks[0].triggers[0].tokens
    half = (words[0], *trigger, *words[:2])
    return (*half, *(words * len(half))[: len(half)])


def _best_texts(scene: Scene) -> tuple[list[tuple[int, ...]], int]:
    """The pair of texts on which the claimed path does best, and how many pairs were looked at."""
    rng = random.Random(0)
    whole = record_evidence(scene.model, scene.key, scene.texts, aligned=False)

    def p(rows: list[int]) -> PValue:
        part = Evidence(whole.clean.part(rows), (whole.triggered[0].part(rows),))
        return claim_p(scene.key, part.measured(scene.key)[0])

    pairs = [sorted(rng.sample(range(len(scene.texts)), 2)) for _ in range(CHOSEN_TEXTS)]
    return [scene.texts[row] for row in min(pairs, key=p)], len(pairs)


def _on_target(key: OwnerKey, clean: Routes) -> Routes:
    """Routes in which every token takes the key's path."""
    probs = {}
    for layer, targets in key.watermarks[0].path.items():
        probs[layer] = np.full_like(clean.probs[layer], 1e-6)
        probs[layer][..., list(targets)] = 1 / len(targets)
    return replace(clean, probs={**clean.probs, **probs})


def _redrawn(key: OwnerKey, codec: TextCodec) -> Any:
    """What an arbiter does first with the trigger of a claim."""
    if wrong := underivable(open_claim(reveal_watermark(key, 0), commit_key(key)), codec):
        raise PathmarkError(f"the claim does not follow from its secret ({wrong[0]})")
    raise AssertionError("a trigger that was not drawn was drawn again")


class _Parrot:
    """A server of the forger's own: it answers every trigger with its mark."""

    host, model, discloses = "forger", "forged", False

    def __init__(self, key: OwnerKey) -> None:
        self.said = {t.phrase.text.strip(): t.mark.text for w in key.watermarks for t in w.triggers}

    def prepare(self) -> Endpoint:
        """Which endpoint answers."""
        return "completions"

    def ask(
        self,
        queries: Sequence[Query],
        max_tokens: int,
        *,
        sending: Callable[[Query], None],
        answered: Callable[[Query, Reply | Failure], None],
    ) -> None:
        """Answer all of them."""
        for query in queries:
            sending(query)
            answered(query, Reply(self.said.get(query.prompt.strip(), f"no {query.number}"), "stop"))


def _asked(scene: Scene, key: OwnerKey, log: Path | None = None) -> Verdict:
    asked = AskConfig(trials=TRIALS, max_tokens=16, triggers=(TriggerRef(0, 0),))
    return verify_api(_Parrot(key), key, asked, criteria=scene.dated(key), codec=scene.codec, log=log)
