"""By which measure a verdict is reached: level, threshold, family, and the date of the key."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field, replace

from pathmark.keys import ClaimedKey, Commitment, VerifierKey, load_commitment
from pathmark.keys.timestamps import load_trusted
from pathmark.verdicts.claims import openable
from pathmark.verification import Criteria, judge_anchor

CommitmentLike = Commitment | str | os.PathLike[str]
"""A commitment, or the file that holds it."""


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """What every kind of verification is judged by."""

    criteria: Criteria = field(default_factory=Criteria)
    commitment: CommitmentLike | None = None
    """Published commitment of the key; with `published` it dates the key, unless the criteria hold an anchor. A claim
    brings its own."""
    others: tuple[CommitmentLike, ...] = ()
    """Further commitments of the same signer that are known: what they may hold counts as tried."""
    published: datetime.date | None = None
    """Day on which the suspect, or its first ancestor, was published."""
    timestamp_roots: str | os.PathLike[str] | None = None
    """PEM file with the root certificates of the time-stamping authorities that the reader trusts."""
    block_headers: str | os.PathLike[str] | None = None
    """File with the headers of Bitcoin blocks that OpenTimestamps proofs lead to, from where the reader trusts."""

    def loaded(self) -> Commitment | None:
        """The commitment, read from its file."""
        return None if self.commitment is None else _loaded(self.commitment)

    def criteria_for(self, key: VerifierKey) -> Criteria:
        """The criteria with the key's date and with everything that could have been opened. A claim is read as a third
        party reads it."""
        counted = self.criteria.family.watermarks * openable(key, [_loaded(other) for other in self.others])
        settled = replace(
            self.criteria,
            strict=self.criteria.strict or isinstance(key, ClaimedKey),
            family=replace(self.criteria.family, watermarks=counted),
        )
        if settled.anchor is not None:
            return settled
        trusted = load_trusted(self.timestamp_roots, self.block_headers)
        return replace(settled, anchor=judge_anchor(key, self.loaded(), self.published, trusted))


def _loaded(commitment: CommitmentLike) -> Commitment:
    return commitment if isinstance(commitment, Commitment) else load_commitment(os.fspath(commitment))
