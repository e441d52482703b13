"""May a third party take the p-value at face value? Only if the key cannot have been chosen after the suspect."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pathmark.errors import VerificationError
from pathmark.keys import ClaimedKey, Commitment, OwnerKey, VerifierKey, check_commitment
from pathmark.keys.key import MAX_WATERMARKS
from pathmark.keys.timestamps import Trusted, existed_by
from pathmark.stats import GRINDING_BITS, PValue, third_party_p


@dataclass(frozen=True)
class Anchor:
    """Whether the key is dated before the suspect, and what an undated one is charged."""

    anchored: bool
    reason: str
    """In words, for the verdict."""
    charge_bits: int
    """What a third party charges an undated key: hashing, and every choice that needs none."""
    committed: Mapping[str, str] = field(default_factory=dict)
    """Attachment -> sha256 under the commitment: what was fixed with the key, and not after the suspect was seen."""
    private: bool = False
    """Whether this is the owner's reading alone: then a third party learns nothing from it."""

    def p(self, p: PValue) -> PValue:
        """The p-value as a third party reads it."""
        if self.private:
            return PValue(0.0)
        return third_party_p(p, anchored=self.anchored, grinding_bits=self.charge_bits)

    def fixed(self, key: VerifierKey, names: Iterable[str]) -> bool:
        """Whether the key's attachments of these names are the ones that were committed."""
        now = key.attachments_at(key.revision)
        return all(name not in now or self.committed.get(name) == now[name].digest for name in names)

    def undated(self, reason: str) -> Anchor:
        """The same for a reading that was chosen later than the key was dated: it is charged."""
        return replace(self, anchored=False, reason=reason)

    def withheld(self, reason: str) -> Anchor:
        """The same for a reading that rests on what its claimant could choose or make up."""
        return replace(self, anchored=False, private=True, reason=reason)


def judge_anchor(
    key: VerifierKey,
    commitment: Commitment | None = None,
    published: datetime.date | None = None,
    trusted: Sequence[Trusted] = (),
) -> Anchor:
    """Compare the commitment's date with the day on which the suspect, or its first ancestor, was published.

    The date inside a commitment is what its owner says and counts for nothing; what rests on an authority or a block
    that is `trusted` does. A commitment that does not fit the key is an error, not a missing anchor. A claim brings its
    own.
    """
    if published is not None and published > datetime.datetime.now(datetime.UTC).date():
        raise VerificationError(f"the suspect cannot have been published on {published}, which is yet to come")
    if isinstance(key, ClaimedKey):
        commitment = key.commitment
    elif commitment is not None and (problems := _misfits(commitment, key)):
        raise VerificationError(f"the commitment does not fit the key: {'; '.join(problems)}")
    if commitment is None:
        return undated(key, "no commitment was given")
    if published is None:
        return undated(key, "the day on which the suspect was published is unknown (--suspect-published)")
    if commitment.limits:
        return undated(key, f"of the commitment, {commitment.limits[0]}")
    moment = existed_by(commitment, trusted)
    if moment is None:
        return undated(
            key,
            "the commitment's date is only what its owner says; nobody whom the reader trusts has stamped it "
            "(pathmark commit --stamp, --timestamp-roots, --block-headers)",
        )
    return dated(key, commitment, moment.astimezone(datetime.UTC).date(), published)


def dated(key: VerifierKey, commitment: Commitment, seen: datetime.date, published: datetime.date) -> Anchor:
    """The anchor of a commitment that somebody who is trusted saw on a known day."""
    if seen >= published:
        return undated(key, f"the commitment of {seen} is not older than the suspect of {published}")
    if isinstance(key, ClaimedKey):
        committed = dict(key.committed)
    else:
        committed = {name: entry.digest for name, entry in key.attachments_at(commitment.revision).items()}
    reason = (
        f"the key's commitment existed no later than {seen} by a trusted timestamp, before the suspect of {published}"
    )
    return replace(undated(key, reason), anchored=True, committed=committed)


def undated(key: VerifierKey, reason: str) -> Anchor:
    """The anchor of a key that may have been made after the suspect was seen."""
    free = sum(watermark.free_choice_bits(len(key.model.routed)) for watermark in key.watermarks)
    return Anchor(False, reason, GRINDING_BITS + math.ceil(free))


def openable(key: VerifierKey, others: Iterable[Commitment] = ()) -> int:
    """How many watermarks the claimant could have held against the suspect in the place of this reading's.

    A claim opens one of those under its root. Further commitments of the same signer, `others`, hide how many they hold
    and count as full, unless the key itself shows that they hold the same.
    """
    own = key.commitment.root if isinstance(key, ClaimedKey) else None
    count = (key.choices or 1) if isinstance(key, ClaimedKey) else 1
    roots = set()
    for other in others:
        if other.fingerprint != key.fingerprint:
            raise VerificationError(
                f"a commitment of {other.fingerprint} tells nothing of {key.fingerprint}; give those of the same signer"
            )
        if other.root != own and (isinstance(key, ClaimedKey) or _misfits(other, key)):
            roots.add(other.root)
    return count + MAX_WATERMARKS * len(roots)


def _misfits(commitment: Commitment, key: VerifierKey) -> list[str]:
    assert isinstance(key, OwnerKey), "a claim was checked against its commitment when it was opened"
    return check_commitment(commitment, key)
