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
from pathmark.keys import Commitment, OwnerKey, RevealedClaim, check_claim, check_commitment
from pathmark.keys.canonical import Document
from pathmark.stats import GRINDING_BITS, PValue
from pathmark.verification import Anchor, Criteria, judge_anchor, verify_model

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
    significance: float = SIGNIFICANCE,
) -> Reading:
    """Read a revealed claim with face value `p` on a suspect that was published on a known day.

    The proofs must hold for this commitment, and the owner's name in the claim must be the commitment's.
    """
    try:
        revealed = check_claim(claim, commitment)
    except KeyFileError as error:
        return Reading(PValue(0.0), 0, False, str(error))
    # a root is public: without a name in it anybody could have signed it
    anchor = _anchor(revealed, witnessed if commitment.owner else None, published)
    read = anchor.p(p)
    return Reading(read, anchor.charge_bits, read.value <= significance, anchor.reason)


@dataclass(frozen=True, eq=False)
class Party:
    """Somebody who says that a model is theirs, and what they can produce."""

    key: OwnerKey
    commitment: Commitment
    """The key commitment."""
    key_witnessed: datetime.date | None
    """When somebody else first saw it."""
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
    p = (_mark_in(first, second.key, second, probes), _mark_in(second, first.key, first, probes))
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


def _mark_in(holder: Party, key: OwnerKey, claimant: Party, probes: Sequence[Sequence[int]]) -> PValue | None:
    """The claimant's mark in the holder's release, as a third party reads it."""
    if holder.release is None:
        return None
    anchor = judge_anchor(key)
    fits = not check_commitment(claimant.commitment, key)
    if fits and _before(claimant.key_witnessed, holder.release_witnessed):
        anchor = Anchor(True, f"the key was seen on {claimant.key_witnessed}, before the release", anchor.charge_bits)
    return verify_model(holder.release, key, probes, criteria=Criteria(anchor=anchor)).p_third_party


def _anchor(revealed: RevealedClaim, witnessed: datetime.date | None, published: datetime.date) -> Anchor:
    watermark, routed = revealed.watermark, len(revealed.model.routed)
    charge = GRINDING_BITS + math.ceil(watermark.free_choice_bits(routed))
    if witnessed is None:
        return Anchor(False, "nobody else has seen the commitment, or it names no owner", charge)
    if not _before(witnessed, published):
        return Anchor(False, f"the commitment was seen on {witnessed}, the suspect is of {published}", charge)
    return Anchor(True, f"the commitment was seen on {witnessed}, before the suspect of {published}", charge)


def _before(earlier: datetime.date | None, later: datetime.date | None) -> bool:
    """A release that nobody saw is as late as can be."""
    return earlier is not None and (later is None or earlier < later)
