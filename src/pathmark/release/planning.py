"""From a model to a key: which layers, which experts may be targets, how long a trigger."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from pathmark.errors import CapacityError
from pathmark.keys import LayerPlan, OwnerKey, PoolRule, WatermarkRequest, create_key
from pathmark.keys.tolerance import MIN_SECRET_BITS
from pathmark.models import ModelReport, bundled_segments, expert_usage
from pathmark.models.describe import describe_model
from pathmark.models.devices import Placement, open_model
from pathmark.models.texts import Texts, given_texts

SIGNIFICANCE = 1e-6
"""The default level of `pathmark verify`; a warning is given where one lost layer puts it out of reach."""
MANY_EXPERTS, USED_EXPERTS = 32, "usage:1-4"
"""Where every layer has so many experts, only those of at least average use become targets: they need no lifting to
outlive a removal of the least used half, which costs clean text less. Fewer experts would leave too few paths."""
POOL_TEXTS = 200
"""Texts on which clean use of experts is measured."""


@dataclass(frozen=True, kw_only=True)
class KeyPlan:
    """What an owner may ask for; the defaults suit one watermark."""

    owner: str = ""
    """Name that stands in the commitments."""
    layers: tuple[tuple[int, ...], ...] = ()
    """Of each watermark, or once for all. Empty: the recommended ones."""
    watermarks: int | None = None
    """None: one, or one for each of `layers`."""
    ids: tuple[int, ...] = ()
    """Of the first watermarks; the others' are drawn from the key."""
    width: int = 2
    """Target experts per layer."""
    pool: str = "auto"
    """Which experts may be targets: `all`, `usage`, `usage:LOW-HIGH`, or `auto`, usage where the weights fit in memory.
    """
    texts: Texts | None = None
    """Clean text to measure the use of experts on: a file, a folder or the texts themselves. None: the bundled one."""
    triggers: int = 1
    """Per watermark."""
    trigger_tokens: int | None = None
    """None: as few as keep enough secret."""
    trigger_texts: tuple[str, ...] = ()
    mark_texts: tuple[str, ...] = ()
    """Free texts instead of drawn ones: none, or one for every trigger of the key."""
    redundancy: int = 0
    """Lost layers that an id survives."""
    placement: Placement = field(default_factory=Placement)
    """Where the use of experts is measured."""
    trust_remote_code: bool = False


def plan_key(model: str, plan: KeyPlan, *, secret: bytes | None = None) -> tuple[OwnerKey, list[str]]:
    """A new key for a model, and what its owner should know about it. Nothing is written."""
    facts, codec, report = describe_model(model, trust_remote_code=plan.trust_remote_code)
    requests, notes = _requests(model, report, codec.tokenizer, plan)
    key, warnings = create_key(facts, requests, codec, owner=plan.owner, secret=secret)
    if plan.pool == "auto" and not notes and _weak_evidence(key):
        requests, _ = _requests(model, report, codec.tokenizer, replace(plan, pool="all"))
        key, warnings = create_key(facts, requests, codec, owner=plan.owner, secret=secret)
        notes = ["all experts may be targets, since those of even use leave too few paths to prove anything by"]
    for watermark in key.watermarks:
        for trigger in watermark.triggers:
            if trigger.secret_bits is not None and trigger.secret_bits < MIN_SECRET_BITS:
                raise CapacityError(
                    f"a trigger of {len(trigger.tokens)} tokens keeps {trigger.secret_bits:.0f} bits secret, expected "
                    f"at least {MIN_SECRET_BITS:.0f}; ask for more --trigger-tokens, or for none to have them chosen"
                )
    return key, [*notes, *warnings, *_weak_evidence(key)]


def _weak_evidence(key: OwnerKey) -> list[str]:
    """Watermarks that could not convince at 1e-6 any more once a layer is lost."""
    return [
        f"watermark {mark.index}: with one layer erased its smallest p-value is above {SIGNIFICANCE:g}; "
        "more layers, a wider pool or a width nearer to half of it give more"
        for mark in key.watermarks
        if mark.paths_after_erasures(1) * SIGNIFICANCE < 1
    ]


def _requests(
    model: str, report: ModelReport, tokenizer: Any, plan: KeyPlan
) -> tuple[list[WatermarkRequest], list[str]]:
    spans = list(plan.layers) or [report.recommended]
    count = plan.watermarks or len(spans)
    if len(spans) not in (1, count):
        raise CapacityError(f"expected --layers once or {count} times, once per watermark, got {len(spans)}")
    if len(plan.ids) > count:
        raise CapacityError(f"expected at most {count} --id, one per watermark, got {len(plan.ids)}")
    spans = spans * count if len(spans) == 1 else spans
    plans, notes = _layer_plans(model, report, tokenizer, sorted({layer for span in spans for layer in span}), plan)
    triggers, marks = (
        _share_out(texts, plan.triggers, count, name)
        for name, texts in (("trigger", plan.trigger_texts), ("mark", plan.mark_texts))
    )
    requests = [
        WatermarkRequest(
            plans=tuple(plans[layer] for layer in span),
            id=plan.ids[i] if i < len(plan.ids) else None,
            redundancy=plan.redundancy,
            triggers=plan.triggers,
            trigger_tokens=plan.trigger_tokens,
            trigger_texts=triggers[i],
            mark_texts=marks[i],
        )
        for i, span in enumerate(spans)
    ]
    return requests, notes


def _share_out(texts: Sequence[str], per_mark: int, count: int, name: str) -> list[tuple[str, ...]]:
    """Free texts dealt to the watermarks in order."""
    if texts and len(texts) != per_mark * count:
        raise CapacityError(f"expected no --{name} or {per_mark * count}, one per trigger, got {len(texts)}")
    return [tuple(texts[i * per_mark : (i + 1) * per_mark]) for i in range(count)]


def _layer_plans(
    model: str, report: ModelReport, tokenizer: Any, layers: Sequence[int], plan: KeyPlan
) -> tuple[dict[int, LayerPlan], list[str]]:
    for layer in layers:
        if not report.facts(layer).is_moe:
            routed = ", ".join(str(facts.layer) for facts in report.routed)
            raise CapacityError(f"layer {layer} is dense; routed layers: {routed}")
    notes: list[str] = []
    asked = plan.pool
    if asked == "auto":
        reason = _why_not_usage(report)
        many = min(report.facts(layer).experts for layer in layers) >= MANY_EXPERTS
        asked = "all" if reason else USED_EXPERTS if many else "usage"
        if reason:
            notes.append(f"all experts may be targets, since {reason}; --pool usage:LOW-HIGH spares rare ones")
    rule = PoolRule.parse(asked)
    usage, name = _usage(model, tokenizer, layers, rule, plan) if rule.needs_usage else ({}, rule.name)
    plans = {}
    for layer in layers:
        experts = report.facts(layer).experts
        pool = rule.pool(experts, usage.get(layer))
        if len(pool) < plan.width:
            raise CapacityError(
                f"layer {layer}: rule {rule.name} admits {len(pool)} of {experts} experts, width "
                f"{plan.width} needs more; use --pool all, wider bounds or other layers"
            )
        plans[layer] = LayerPlan(layer, experts, plan.width, pool, name)
    return plans, notes


def _usage(
    model: str, tokenizer: Any, layers: Sequence[int], rule: PoolRule, plan: KeyPlan
) -> tuple[dict[int, Any], str]:
    """Use of experts on clean text, and the rule's name with the digest of that text."""
    texts = list(bundled_segments() if plan.texts is None else given_texts(plan.texts))[:POOL_TEXTS]
    if not texts:
        raise CapacityError("no clean text to measure the use of experts on; give other --texts")
    loaded = open_model(model, plan.placement, trust_remote_code=plan.trust_remote_code)
    digest = sha256("\n".join(texts).encode()).hexdigest()
    return expert_usage(loaded, tokenizer, texts, layers), f"{rule.name} on texts sha256:{digest}"


def _why_not_usage(report: ModelReport) -> str | None:
    """Why clean use is not measured by default, or None if it can be."""
    if report.weights != "ok":
        return f"the weights are {report.weights}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if report.parameters * 4 > memory // 2:
        return "the weights take more than half of the free memory"
    return None
