"""What a verdict is judged by: the one home of gamma, the level, the family and who decides."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pathmark.errors import VerificationError
from pathmark.keys import VerifierKey
from pathmark.stats import Family, PValue
from pathmark.verdicts.claims import Anchor, judge_anchor


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """Fixed before anything is measured; part of every verdict."""

    gamma: float = 0.8
    """Share of tokens on the path from which on a text counts in the paper's WSR. No part of the test."""
    significance: float = 1e-6
    """Level of the test, after the correction for the family."""
    strict: bool = False
    """Whether the third party's p-value decides instead of the owner's."""
    family: Family = field(default_factory=Family)
    """Everything that was tried; all of it is charged."""
    anchor: Anchor | None = None
    """Whether the key is dated before the suspect (`judge_anchor`). None: it is not."""

    def __post_init__(self) -> None:
        if not 0 < self.significance < 1:
            raise VerificationError(f"the significance level lies between 0 and 1, got {self.significance:g}; try 1e-6")
        if not 0 < self.gamma <= 1:
            raise VerificationError(f"gamma is a share between 0 and 1, got {self.gamma:g}; the paper uses 0.8")

    def of(self, key: VerifierKey) -> Criteria:
        """The same with what an undated key is charged, where no anchor was given."""
        return self if self.anchor is not None else replace(self, anchor=judge_anchor(key))

    def deciding(self, p: PValue) -> PValue:
        """A p-value as the one reads it who decides."""
        return self.anchor.p(p) if self.strict and self.anchor is not None else p
