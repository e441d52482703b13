"""By which measure a verdict is reached: level, threshold, family, and the date of the key."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from pathmark.keys import Commitment, OwnerKey, load_commitment
from pathmark.keys.timestamps import load_roots
from pathmark.verification import Criteria, judge_anchor


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """What every kind of verification is judged by."""

    criteria: Criteria = field(default_factory=Criteria)
    commitment: Commitment | str | os.PathLike[str] | None = None
    """Published commitment of the key; with `published` it dates the key, unless the criteria hold an anchor."""
    published: datetime.date | None = None
    """Day on which the suspect, or its first ancestor, was published."""
    timestamp_roots: str | os.PathLike[str] | None = None
    """PEM file with the root certificates of the time-stamping authorities that the reader trusts."""

    def criteria_for(self, key: OwnerKey) -> Criteria:
        """The criteria with the key's date."""
        if self.criteria.anchor is not None:
            return self.criteria
        given = self.commitment
        loaded = given if given is None or isinstance(given, Commitment) else load_commitment(os.fspath(given))
        roots = [] if self.timestamp_roots is None else load_roots(Path(self.timestamp_roots))
        return replace(self.criteria, anchor=judge_anchor(key, loaded, self.published, roots))
