"""White-box verification: probes in, verdict out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from pathmark.keys import OwnerKey
from pathmark.stats import (
    Family,
    PValue,
    Rate,
    bonferroni,
    exact_test,
    exact_test_many,
    third_party_p,
)
from pathmark.verify.decode import decode_id
from pathmark.verify.measures import PathScore, measure_layers, score_path
from pathmark.verify.routes import record_routes


@dataclass(frozen=True)
class Verdict:
    """What was found, how surprising it is, and on how much it rests."""

    p: PValue
    """The owner's p-value, corrected for the family."""
    p_floor: PValue
    """The smallest one that this key could have reached."""
    p_third_party: PValue
    anchored: bool
    """Whether a third party may take p at face value."""
    significance: float
    scores: tuple[PathScore, ...]
    """The paper's measures, per watermark."""
    id: int | None
    """Decoded blindly; None where nothing is marked or the digits belong to no id."""
    family: Family
    n_probes: int
    n_tokens: int

    @property
    def marked(self) -> bool:
        """Whether the owner's p-value is at or below the significance level."""
        return self.p.value <= self.significance

    @property
    def wsr(self) -> Rate:
        """WSR of the first watermark."""
        return self.scores[0].wsr

    def words(self) -> str:
        """One paragraph for people."""
        found = "The mark is there" if self.marked else "No mark was found"
        return (
            f"{found}: p = {self.p} at level {self.significance:g} (smallest possible {self.p_floor}; {self.family}), "
            f"accuracy {self.scores[0].accuracy.value:.3f}, WSR {self.wsr}, on {self.n_probes} texts with "
            f"{self.n_tokens:,} tokens. A third party reads {self.p_third_party}"
            f"{'' if self.anchored else ': no dated commitment was given, so 80 bits are charged'}."
        )

    def summary(self) -> dict[str, Any]:
        """The documented JSON object."""
        return {
            "marked": self.marked,
            "p_value": self.p.value,
            "log10_p": self.p.log10,
            "p_floor": self.p_floor.value,
            "p_third_party": self.p_third_party.value,
            "anchored": self.anchored,
            "significance": self.significance,
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
            "n_probes": self.n_probes,
            "n_tokens": self.n_tokens,
        }


def verify_model(
    model: nn.Module,
    key: OwnerKey,
    probes: Sequence[Sequence[int]],
    *,
    gamma: float = 0.8,
    significance: float = 1e-6,
    anchored: bool = False,
    family: Family | None = None,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Run the probes with and without each watermark's trigger and test the difference exactly."""
    family = family or Family()
    layers = sorted({layer for watermark in key.watermarks for layer in watermark.layers})
    clean = record_routes(model, probes, layers, progress=progress)
    scores, measured = [], []
    for watermark in key.watermarks:
        trigger = watermark.triggers[0].tokens
        triggered = record_routes(model, probes, layers, prefix=trigger, progress=progress)
        scores.append(score_path(watermark, triggered, clean, gamma=gamma))
        measured.append(measure_layers(watermark, triggered, clean))
    aimed = [[m.aim(w.targets(m.layer)) for m in ms] for w, ms in zip(key.watermarks, measured, strict=True)]
    if len(aimed) == 1:
        single = exact_test(aimed[0])
        p, floor = single.p, single.floor
    else:
        combined = exact_test_many(aimed)
        p, floor = combined.p, combined.floor
    corrected = bonferroni(p, family)
    marked = corrected.value <= significance
    return Verdict(
        p=corrected,
        p_floor=floor,
        p_third_party=third_party_p(corrected, anchored=anchored),
        anchored=anchored,
        significance=significance,
        scores=tuple(scores),
        id=decode_id(key.watermarks[0], measured[0]).id if marked else None,
        family=family,
        n_probes=len(probes),
        n_tokens=clean.n_tokens,
    )
