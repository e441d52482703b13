"""Several watermarks in one model: does each work, and does any speak for another?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from pathmark.keys import OwnerKey
from pathmark.stats import PValue, Rate, exact_test
from pathmark.verification import Evidence, decode_id, record_evidence, score_path


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All watermarks of one model."""

    wsr: tuple[Rate, ...]
    """Texts behind each watermark's own trigger that take its path."""
    crossed: Rate
    """Texts behind one watermark's trigger that take the path of another, over all pairs."""
    clean: Rate
    """Texts without a trigger that take a path, over all watermarks."""
    p: tuple[PValue, ...]
    ids_right: Rate


def total(rates: Sequence[Rate]) -> Rate:
    """All trials together; none where there are no rates to add."""
    return Rate(sum(rate.hits for rate in rates), max(1, sum(rate.n for rate in rates)))


def crossings(evidence: Evidence, key: OwnerKey, place: int) -> list[Rate]:
    """Texts behind the trigger of one watermark that take the path of another, one rate for each other one."""
    return [
        score_path(mark, evidence.triggered[place]).wsr for other, mark in enumerate(key.watermarks) if other != place
    ]


def read_marks(model: PreTrainedModel, key: OwnerKey, probes: Sequence[Sequence[int]]) -> Reading:
    """Every path behind every trigger."""
    evidence = record_evidence(model, key, probes, aligned=False)
    marks, measured = key.watermarks, evidence.measured(key)
    right = sum(decode_id(mark, layers).id == mark.id for mark, layers in zip(marks, measured, strict=True))
    return Reading(
        wsr=tuple(score_path(mark, routes).wsr for mark, routes in zip(marks, evidence.triggered, strict=True)),
        crossed=total([rate for place in range(len(marks)) for rate in crossings(evidence, key, place)]),
        clean=total([score_path(mark, evidence.clean).wsr for mark in marks]),
        p=tuple(
            exact_test([m.aim(mark.targets(m.layer)) for m in layers]).p
            for mark, layers in zip(marks, measured, strict=True)
        ),
        ids_right=Rate(right, len(marks)),
    )
