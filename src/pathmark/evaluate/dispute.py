"""What an arbiter does with claims and releases: the procedure of docs/disputes.md, step by step.

Dates inside a commitment are what its maker says. Here a commitment counts from the day on which somebody else saw it
(`witnessed`), and from no day at all where nobody did.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from pathmark.errors import KeyFileError
from pathmark.keys import ClaimedKey, Commitment, open_claim
from pathmark.keys.canonical import Document
from pathmark.stats import Family, PValue
from pathmark.verdicts.claims import dated, openable, undated
from pathmark.verification import Anchor, Criteria, verify_model

SIGNIFICANCE = Criteria.significance


@dataclass(frozen=True)
class Reading:
    """What a third party makes of a claim."""

    p: PValue
    """1 for a claim that does not hold."""
    charge_bits: int
    accepted: bool
    reason: str


def read_claim(
    claim: Document,
    commitment: Commitment,
    p: PValue,
    *,
    witnessed: datetime.date | None,
    published: datetime.date,
    others: Sequence[Commitment] = (),
    significance: float = SIGNIFICANCE,
) -> Reading:
    """Read a revealed claim with face value `p` on a suspect that was published on a known day.

    The proofs must hold for this commitment, and the owner's name in the claim must be the commitment's. `others` are
    further commitments of the same signer that are known.
    """
    try:
        key = open_claim(claim, commitment)
    except KeyFileError as error:
        return Reading(PValue(0.0), 0, False, str(error))
    anchor = _anchor(key, witnessed, published)
    read = anchor.p(p.charged(math.log10(openable(key, others))))
    return Reading(read, anchor.charge_bits, read.value <= significance, anchor.reason)


@dataclass(frozen=True, eq=False)
class Party:
    """Somebody who says that a model is theirs, and what they can produce."""

    claim: ClaimedKey
    """One watermark, opened against the key commitment."""
    key_witnessed: datetime.date | None
    """When somebody else first saw that commitment."""
    release: nn.Module | None
    """The released model whose digests were committed; None where none can be produced."""
    release_witnessed: datetime.date | None = None
    """When somebody else first saw the release commitment."""


@dataclass(frozen=True)
class Settlement:
    """Which of two releases is the prior one."""

    prior: int | None
    """0 or 1; None where the procedure does not decide."""
    contains: tuple[bool | None, bool | None]
    """Whether the release of each party contains the other's mark, as a third party reads it; None without one."""
    p: tuple[PValue | None, PValue | None]
    """The third party's p-values of that."""
    reason: str


def settle_dispute(
    parties: tuple[Party, Party], probes: Sequence[Sequence[int]], *, significance: float = SIGNIFICANCE
) -> Settlement:
    """Two marks in one model: the release that does not contain the other's mark is the prior one.

    A mark counts in the other's release only as a third party reads it: its key must have been seen before that
    release, or is charged, so that nobody grinds a key to fit the rival's release afterwards.
    """
    first, second = parties
    p = (_mark_in(first, second, probes), _mark_in(second, first, probes))
    contains = tuple(None if value is None else value.value <= significance for value in p)
    assert len(contains) == 2
    for mine, name in ((0, "first"), (1, "second")):
        if contains[mine] is False and contains[1 - mine]:
            return Settlement(mine, contains, p, f"only the other release contains the mark of the {name} party")
    if None in contains:
        reason = "a party that cannot produce its committed release has not shown priority"
    elif all(contains):
        reason = "each release contains the other's mark: neither can be the first"
    else:
        reason = "neither release contains the other's mark: they do not descend from one another"
    return Settlement(None, contains, p, reason)


def _mark_in(holder: Party, claimant: Party, probes: Sequence[Sequence[int]]) -> PValue | None:
    """The claimant's mark in the holder's release, as a third party reads it."""
    if holder.release is None:
        return None
    key, published = claimant.claim, holder.release_witnessed or datetime.date.max  # unseen: as late as can be
    criteria = Criteria(anchor=_anchor(key, claimant.key_witnessed, published), family=Family(watermarks=openable(key)))
    return verify_model(holder.release, key, probes, criteria=criteria).p_third_party


def _anchor(key: ClaimedKey, witnessed: datetime.date | None, published: datetime.date) -> Anchor:
    if witnessed is None:
        return undated(key, "nobody else has seen the commitment")
    if key.commitment.limits:
        return undated(key, f"of the commitment, {key.commitment.limits[0]}")
    return dated(key, key.commitment, witnessed, published)
