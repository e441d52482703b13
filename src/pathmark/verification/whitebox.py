"""White-box verification: probes in, verdict out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from transformers import PreTrainedModel

from pathmark.keys import OwnerKey
from pathmark.stats import (
    ExactResult,
    Family,
    PValue,
    Rate,
    bonferroni,
    exact_test,
    exact_test_many,
)
from pathmark.verification.alignment import Alignment
from pathmark.verification.anchor import Anchor, judge_anchor
from pathmark.verification.decision import AS_JSON, EXIT_CODES, Decision
from pathmark.verification.decode import DecodedId, decode_id
from pathmark.verification.decoys import DecoyControl
from pathmark.verification.evidence import Evidence, record_evidence, record_grafted
from pathmark.verification.measures import PathScore, score_path


@dataclass(frozen=True)
class Verdict:
    """What was found, how surprising it is, and on how much it rests."""

    p: PValue
    """The owner's p-value, corrected for the family."""
    p_floor: PValue
    """The smallest one that this key could have reached."""
    anchor: Anchor
    """Whether a third party may take p at face value, and what it is charged otherwise."""
    significance: float
    gamma: float
    scores: tuple[PathScore, ...]
    """The paper's measures, per watermark."""
    id: int | None
    """Decoded blindly; None where nothing is marked or the digits belong to no id."""
    family: Family
    n_probes: int
    n_tokens: int
    alignment: Alignment | None = None
    """How the suspect's experts were matched to the owner's; None where they were taken by their numbers."""
    erased_layers: tuple[int, ...] = ()
    """Marked layers none of whose targets has a counterpart in the suspect: they count neither way."""
    decoded: DecodedId | None = None
    """How clearly each layer of the first watermark spoke."""
    decoys: DecoyControl | None = None
    """The owner's path behind triggers of other keys."""
    strict: bool = False
    """Whether the third party's reading decides."""
    notes: tuple[str, ...] = ()
    """What could not be done, and why."""
    grafted: bool = False
    """Whether the suspect's marked layers were fed by the original's lower ones."""
    other: Verdict | None = None
    """The other reading, as it is or grafted, where both were made; this one has the smaller p."""

    @property
    def marked(self) -> bool:
        """Whether the deciding p-value is at or below the significance level."""
        return (self.p_third_party if self.strict else self.p).value <= self.significance

    @property
    def decision(self) -> Decision:
        """Undecided is a case in which this key could not have reached the level on this suspect."""
        reachable = (self.anchor.p(self.p_floor) if self.strict else self.p_floor).value <= self.significance
        return "marked" if self.marked else "not marked" if reachable else "undecided"

    @property
    def exit_code(self) -> int:
        """0 marked, 1 not marked, 2 undecided."""
        return EXIT_CODES[self.decision]

    @property
    def p_third_party(self) -> PValue:
        """What somebody may believe who does not know that the key was not ground, nor where the original is from."""
        plain = self.other if self.grafted and self.other is not None else self
        return self.anchor.p(plain.p)

    @property
    def wsr(self) -> Rate:
        """WSR of the first watermark."""
        return self.scores[0].wsr

    def words(self) -> str:
        """One paragraph for people."""
        found = {
            "marked": "The mark is there",
            "not marked": "No mark was found",
            "undecided": "Undecided, since this key cannot reach the level on this suspect",
        }[self.decision]
        if self.strict and not self.marked and self.p.value <= self.significance:
            found = "A third party need not believe that the mark is there"
        charged = "" if self.anchor.anchored else f", charged {self.anchor.charge_bits} bits"
        return (
            f"{found}: p = {self.p} at level {self.significance:g} (smallest possible {self.p_floor}; {self.family}), "
            f"accuracy {self.scores[0].accuracy.value:.3f}, WSR {self.wsr}, on {self.n_probes} texts with "
            f"{self.n_tokens:,} tokens. A third party reads {self.p_third_party}{charged}: {self.anchor.reason}."
            f"{'' if self.alignment is None else ' ' + self.alignment.words()}{self._other_words()}"
        )

    def _other_words(self) -> str:
        if self.other is None:
            return ""
        if self.grafted:
            return (
                " This is read in the suspect's marked layers, fed by the original's layers below them; read as it is, "
                f"the suspect gives p = {self.other.p} and WSR {self.other.wsr}."
            )
        fed = f"p = {self.other.p} and WSR {self.other.wsr}"
        return f" Fed by the original's lower layers, its marked layers give {fed}."

    def weaknesses(self) -> list[str]:
        """What would weaken this verdict, in words."""
        found = list(self.notes)
        if self.decoys is not None and self.decoys.smallest.value < 0.01:
            found.append(
                f"the owner's path also reacts to decoy triggers (smallest p {self.decoys.smallest}, charged): the "
                "suspect may react to odd prefixes as such"
            )
        if self.marked and self.alignment is not None and self.alignment.confidence < 0.1:
            found.append(f"experts were matched with little confidence ({self.alignment.confidence:.2f})")
        if self.grafted:
            found.append(
                "whoever may choose the original's layers can make any model take any path: a third party is given the "
                "suspect as it is"
            )
        if self.erased_layers:
            lost = ", ".join(map(str, self.erased_layers))
            found.append(f"layers {lost} have lost their targets and count neither way")
        if self.marked and self.id is None:
            found.append("no id could be read")
        if not self.marked and self.p_floor.value > self.significance:
            found.append(
                f"this key cannot reach the level on this suspect (smallest possible p {self.p_floor}): no verdict "
                "against it, and none for it"
            )
        if not self.anchor.anchored:
            found.append(f"for a third party the key is not anchored: {self.anchor.reason}")
        found.append("suspects, keys or texts that were tried and are not counted in the family")
        return found

    def summary(self) -> dict[str, Any]:
        """The documented JSON object."""
        return {
            "verdict": self.decision,
            "marked": AS_JSON[self.decision],
            "p_value": self.p.value,
            "log10_p": self.p.log10,
            "p_floor": self.p_floor.value,
            "p_third_party": self.p_third_party.value,
            "anchored": self.anchor.anchored,
            "anchor": {"reason": self.anchor.reason, "charge_bits": self.anchor.charge_bits},
            "strict": self.strict,
            "significance": self.significance,
            "gamma": self.gamma,
            "accuracy": self.scores[0].accuracy.value,
            "wsr": self.wsr.value,
            "wsr_interval": list(self.wsr.interval()),
            "layers": [
                {
                    "watermark": j,
                    "layer": row.layer,
                    "accuracy": row.accuracy.value,
                    "accuracy_own_topk": row.accuracy_own_topk.value,
                    "mass_triggered": row.mass_triggered,
                    "mass_clean": row.mass_clean,
                }
                for j, score in enumerate(self.scores)
                for row in score.layers
            ],
            "id": self.id,
            "id_confidence": list(self.decoded.confidence) if self.decoded is not None else [],
            "alignment": self.alignment.summary() if self.alignment is not None else None,
            "erased_layers": list(self.erased_layers),
            "decoys": None if self.decoys is None else self.decoys.summary(),
            "family": {field.name: getattr(self.family, field.name) for field in fields(self.family)},
            "grafted": self.grafted,
            "other_reading": None
            if self.other is None
            else {
                "grafted": self.other.grafted,
                "p_value": self.other.p.value,
                "log10_p": self.other.p.log10,
                "accuracy": self.other.scores[0].accuracy.value,
                "wsr": self.other.wsr.value,
            },
            "n_probes": self.n_probes,
            "n_tokens": self.n_tokens,
            "words": self.words(),
            "weaknesses": self.weaknesses(),
        }


def verify_model(
    model: PreTrainedModel,
    key: OwnerKey,
    probes: Sequence[Sequence[int]],
    *,
    original: PreTrainedModel | None = None,
    gamma: float = 0.8,
    significance: float = 1e-6,
    anchor: Anchor | None = None,
    family: Family | None = None,
    align: bool = True,
    batch_tokens: int = 4096,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Run the probes with and without each watermark's trigger and test the difference exactly.

    `align` matches the suspect's experts to the original's first, where the key has profiles attached. Without an
    `anchor` (see `judge_anchor`) the key counts as undated for third parties. With the unmarked `original` the
    suspect is also read behind its lower layers (`record_grafted`).
    """
    settings: dict[str, Any] = {"aligned": align, "batch_tokens": batch_tokens, "progress": progress}
    evidence = record_evidence(model, key, probes, **settings)
    fed = None if original is None else record_grafted(model, original, key, probes, **settings)
    return judge(key, evidence, fed, gamma=gamma, significance=significance, anchor=anchor, family=family)


def judge(
    key: OwnerKey,
    evidence: Evidence,
    fed: Evidence | None = None,
    *,
    gamma: float = 0.8,
    significance: float = 1e-6,
    anchor: Anchor | None = None,
    strict: bool = False,
    family: Family | None = None,
    notes: Sequence[str] = (),
) -> Verdict:
    """The verdict on recorded evidence, wherever it was recorded.

    `fed` is the same behind the original's lower layers (`record_grafted`): a second statistic, so both are charged
    for two, and the smaller p is the verdict.
    """
    family = family or Family()
    settings: dict[str, Any] = {
        "gamma": gamma,
        "significance": significance,
        "anchor": anchor or judge_anchor(key),
        "strict": strict,
        "notes": tuple(notes),
    }
    if fed is None:
        return _judge(key, evidence, family, **settings)
    family = replace(family, statistics=2 * family.statistics)
    plain, second = _judge(key, evidence, family, **settings), _judge(key, fed, family, **settings)
    if second.p.log10 < plain.p.log10:
        return replace(second, grafted=True, other=plain)
    return replace(plain, other=replace(second, grafted=True))


def _judge(key: OwnerKey, evidence: Evidence, family: Family, **settings: Any) -> Verdict:
    clean, gamma = evidence.clean, settings["gamma"]
    scores = [
        score_path(watermark, triggered, clean, gamma=gamma)
        for watermark, triggered in zip(key.watermarks, evidence.triggered, strict=True)
    ]
    measured = evidence.measured(key)
    aimed = [[m.aim(w.targets(m.layer)) for m in ms] for w, ms in zip(key.watermarks, measured, strict=True)]
    results: tuple[ExactResult, ...]
    if len(aimed) == 1:
        single = exact_test(aimed[0])
        p, floor, results = single.p, single.floor, (single,)
    else:
        combined = exact_test_many(aimed)
        p, floor, results = combined.p, combined.floor, combined.results
    corrected = bonferroni(p, family)
    decoded = decode_id(key.watermarks[0], measured[0]) if corrected.value <= settings["significance"] else None
    return Verdict(
        p=corrected,
        p_floor=floor,
        scores=tuple(scores),
        id=None if decoded is None else decoded.id,
        family=family,
        n_probes=len(clean.mask_BT),
        n_tokens=clean.n_tokens,
        alignment=evidence.alignment,
        erased_layers=tuple(sorted({layer for result in results for layer in result.erased_layers})),
        decoded=decoded,
        decoys=_control(key, evidence),
        **settings,
    )


def _control(key: OwnerKey, evidence: Evidence) -> DecoyControl | None:
    if not evidence.decoys:
        return None
    first = key.watermarks[0]
    tested = [exact_test([m.aim(first.targets(m.layer)) for m in ms]).p for ms in evidence.measured_decoys(key)]
    return DecoyControl(tuple(tested), len(evidence.decoys[0].mask_BT))
