"""By which measure a verdict is reached: level, threshold, family, and the date of the key."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field, replace

from pathmark.errors import VerificationError
from pathmark.keys import Commitment, OwnerKey, load_commitment
from pathmark.stats import Family
from pathmark.verification import Anchor, Examined, Verdict, judge, judge_anchor


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """What is asked of the evidence."""

    gamma: float = 0.8
    """Threshold of the paper's WSR."""
    significance: float = 1e-6
    """Level of the exact test."""
    strict: bool = False
    """Let the third party's p-value decide, not the owner's."""
    family: Family = field(default_factory=Family)
    """Suspects and keys that were tried in this case."""
    anchor: Anchor | None = None
    """Whether the key is dated before the suspect; None: it is not."""

    def __post_init__(self) -> None:
        if not 0 < self.significance < 1 or not 0 < self.gamma <= 1:
            raise VerificationError("--significance and --gamma lie between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """What every kind of verification is judged by."""

    criteria: Criteria = field(default_factory=Criteria)
    commitment: Commitment | str | os.PathLike[str] | None = None
    """Published commitment of the key; with `published` it dates the key, unless the criteria hold an anchor."""
    published: datetime.date | None = None
    """Day on which the suspect, or its first ancestor, was published."""

    def criteria_for(self, key: OwnerKey) -> Criteria:
        """The criteria with the key's date."""
        if self.criteria.anchor is not None:
            return self.criteria
        given = self.commitment
        loaded = given if given is None or isinstance(given, Commitment) else load_commitment(os.fspath(given))
        return replace(self.criteria, anchor=judge_anchor(key, loaded, self.published))


def judge_examined(key: OwnerKey, examined: Examined, criteria: Criteria) -> Verdict:
    """The verdict on what was recorded."""
    return judge(
        key, examined.evidence, examined.fed, notes=examined.notes, gamma=criteria.gamma,
        significance=criteria.significance, strict=criteria.strict, family=criteria.family, anchor=criteria.anchor,
    )  # fmt: skip
