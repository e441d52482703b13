"""The verdict on routing evidence, wherever it was recorded: exact test, the paper's measures, the id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pathmark.keys import VerifierKey
from pathmark.models.original import VOCABULARY
from pathmark.stats import ExactResult, LayerMeasurement, PValue, Rate, bonferroni, exact_test, exact_test_many
from pathmark.verdicts.claims import Anchor
from pathmark.verdicts.criteria import Criteria
from pathmark.verdicts.verdict import Verdict
from pathmark.verdicts.wording import texts_read
from pathmark.verification.decoys import DecoyControl
from pathmark.verification.paths.alignment import Alignment
from pathmark.verification.paths.decode import DecodedId, decode_id
from pathmark.verification.paths.evidence import Evidence
from pathmark.verification.paths.measures import PathScore, score_path

PROBED_WITH = ("probes.json",)
"""Attachments that hold the texts a suspect is read with."""
MATCHED_BY = (*PROBED_WITH, "profiles.npz", "sketches.npz")
"""Attachments that decide which of a suspect's experts is taken for which of the owner's."""
GRAFT_ONLY = "it shows only behind the original's lower layers, which whoever claims the mark could have chosen"
UNREACHABLE = (
    "this key cannot reach the level on this suspect (smallest possible p {}): no verdict against it, and none for it"
)


@dataclass(frozen=True, kw_only=True)
class PathVerdict(Verdict):
    """What the routing showed, how surprising it is, and on how much it rests."""

    p: PValue
    p_floor: PValue
    scores: tuple[PathScore, ...]
    """The paper's measures, per watermark."""
    id: int | None
    """Decoded blindly; None where nothing is marked or the digits belong to no id."""
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
    grafted: bool = False
    """Whether the suspect's marked layers were fed by the original's lower ones."""
    other: PathVerdict | None = None
    """The other reading, as it is or grafted, where both were made; this one has the smaller p."""
    handed_over: bool = False
    """Whether somebody brought the routes, instead of this program measuring them."""

    @property
    def p_third_party(self) -> PValue:
        """As for every verdict; and a third party does not know where an original is from."""
        plain = self.other if self.grafted and self.other is not None else self
        return self.anchor.p(plain.p)

    @property
    def wsr(self) -> Rate:
        """WSR of the first watermark."""
        return self.scores[0].wsr

    def _examined(self) -> str:
        return texts_read(self.n_probes, self.n_tokens, handed_over=self.handed_over)

    def _missing(self) -> str:
        return GRAFT_ONLY if self.grafted and self.anchor.anchored else super()._missing()

    def _figures(self) -> list[str]:
        found = [
            *super()._figures(),
            f"accuracy {self.scores[0].accuracy.value:.3f}, WSR {self.wsr}, on {self.n_probes} texts with "
            f"{self.n_tokens:,} tokens",
        ]
        if self.alignment is not None:
            found.append(self.alignment.words())
        if self.other is not None:
            other = f"p = {self.other.p} and WSR {self.other.wsr}"
            found.append(
                f"this is read in the suspect's marked layers, fed by the original's layers below them; as it is, the "
                f"suspect gives {other}"
                if self.grafted
                else f"fed by the original's lower layers, the suspect's marked layers give {other}"
            )
        return found

    def weaknesses(self) -> list[str]:
        """What would weaken this verdict, in words."""
        found = []
        if self.decoys is not None and self.decoys.speak:
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
        return [*found, *super().weaknesses()]

    def summary(self) -> dict[str, Any]:
        """The object that verify.schema.json documents."""
        other = self.other
        return {
            **super().summary(),
            "gamma": self.criteria.gamma,
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
            "grafted": self.grafted,
            "other_reading": None
            if other is None
            else {
                "grafted": other.grafted,
                "p_value": other.p.value,
                "log10_p": other.p.log10,
                "accuracy": other.scores[0].accuracy.value,
                "wsr": other.wsr.value,
            },
            "n_probes": self.n_probes,
            "n_tokens": self.n_tokens,
        }


def judge(
    key: VerifierKey,
    evidence: Evidence,
    fed: Evidence | None = None,
    criteria: Criteria | None = None,
    notes: Sequence[str] = (),
    mute: str | None = None,
) -> PathVerdict:
    """The verdict on recorded evidence, wherever it was recorded.

    `fed` is the same behind the original's lower layers (`record_grafted`): a second statistic, so both are charged
    for two, and the smaller p is the verdict. `notes` and `mute` are those of `Examined`: what could not be done, and
    why no mark found would mean nothing.
    """
    settled = (criteria or Criteria()).of(key)
    control = _control(key, evidence)
    settled = replace(settled, anchor=_third_party(key, evidence, settled, control))
    if fed is None:
        return _judge(key, evidence, settled, notes, mute, control)
    twice = replace(settled, family=replace(settled.family, statistics=2 * settled.family.statistics))
    plain = _judge(key, evidence, twice, notes, mute, control)
    second = _judge(key, fed, twice, notes, mute, _control(key, fed))
    if second.p.log10 < plain.p.log10:
        return replace(second, grafted=True, other=plain)
    return replace(plain, other=replace(second, grafted=True))


def _third_party(key: VerifierKey, evidence: Evidence, criteria: Criteria, control: DecoyControl | None) -> Anchor:
    """The anchor, withheld where the reading rests on what its claimant may have chosen after seeing the suspect."""
    anchor, matched = criteria.anchor, evidence.alignment
    assert anchor is not None
    if evidence.handed_over:
        return anchor.withheld("whoever claims the mark recorded these routes, and could have written any")
    if matched is not None and not matched.identity and not anchor.fixed(key, MATCHED_BY):
        return anchor.withheld(
            "experts were renumbered by profiles that no dated commitment fixes, and profiles chosen afterwards can "
            "lead to any experts; commit the key again after embedding, or read by numbers with --no-align"
        )
    if matched is not None and not matched.identity and not (evidence.public and matched.sure):
        return anchor.withheld(
            "experts were renumbered by profiles that need not be of this suspect's ancestor: a third party believes "
            "that only on public texts, or on texts of its own, and where they clearly agree; read by numbers with "
            "--no-align"
        )
    if VOCABULARY in evidence.rests_on:  # as good as a free choice of the trigger, dated or not
        return anchor.withheld("which token is which was said by the owner, and with that which tokens the trigger is")
    if not evidence.rests_on <= set(key.attachments) or not anchor.fixed(key, evidence.rests_on):
        return anchor.withheld("the suspect was read under a config of the owner's that no dated commitment fixes")
    if anchor.anchored and not anchor.fixed(key, PROBED_WITH):
        return anchor.undated("the texts that the suspect was read with are not in the dated commitment")
    if control is not None and control.speak:
        return anchor.withheld("triggers of other keys lead to the same experts, so this trigger is not what does it")
    return anchor


def _judge(
    key: VerifierKey,
    evidence: Evidence,
    criteria: Criteria,
    notes: Sequence[str],
    mute: str | None,
    control: DecoyControl | None,
) -> PathVerdict:
    clean = evidence.clean
    scores = [
        score_path(watermark, triggered, clean, gamma=criteria.gamma)
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
    corrected = bonferroni(p, criteria.family)
    found = corrected.value <= criteria.significance
    decoded = decode_id(key.watermarks[0], measured[0]) if found else None
    reachable = criteria.deciding(floor)
    return PathVerdict(
        p=corrected,
        p_floor=floor,
        criteria=criteria,
        undecided=UNREACHABLE.format(reachable) if reachable.value > criteria.significance else None if found else mute,
        notes=tuple(notes),
        scores=tuple(scores),
        id=None if decoded is None else decoded.id,
        n_probes=len(clean.mask_BT),
        n_tokens=clean.n_tokens,
        alignment=evidence.alignment,
        erased_layers=tuple(sorted({layer for result in results for layer in result.erased_layers})),
        decoded=decoded,
        decoys=control,
        handed_over=evidence.handed_over,
    )


def _control(key: VerifierKey, evidence: Evidence) -> DecoyControl | None:
    if not evidence.decoys:
        return None
    first = key.watermarks[0]

    def tested(measured: Sequence[LayerMeasurement]) -> ExactResult:
        return exact_test([m.aim(first.targets(m.layer)) for m in measured])

    trigger = tested(evidence.measured(key)[0]).statistic
    decoys = [tested(measured) for measured in evidence.measured_decoys(first)]
    loudness = tuple(decoy.statistic / trigger if trigger > 0 else 1.0 for decoy in decoys)
    return DecoyControl(tuple(decoy.p for decoy in decoys), len(evidence.decoys[0].mask_BT), loudness)
