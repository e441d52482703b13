"""The owner's look at what a thief found: did any of it set the path off?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from pathmark.attacks.search import Finding, TriggerSearchResult
from pathmark.keys import OwnerKey
from pathmark.release.scan import fires
from pathmark.stats import Rate
from pathmark.verification import Criteria


@dataclass(frozen=True)
class Judged:
    """How many of the thief's prefixes are the mark."""

    suspicious: Rate | None
    """Of those that the thief would believe in; None where there are none."""
    looked_at: Rate
    """Of all that got a second look."""
    hits: tuple[Finding, ...]
    """Prefixes that set a path off."""
    itself: bool
    """Whether a trigger of the key, token for token, is among those that the thief believes in."""

    @property
    def found(self) -> bool:
        """Whether the thief holds a prefix that works and has reason to believe in it."""
        return self.suspicious is not None and self.suspicious.hits > 0


def judge_findings(
    model: nn.Module,
    key: OwnerKey,
    result: TriggerSearchResult,
    texts: Sequence[Sequence[int]],
    *,
    gamma: float = Criteria.gamma,
) -> Judged:
    """A prefix is the mark if Acc >= gamma behind it on at least half of the texts, for any watermark of the key."""

    def works(finding: Finding) -> bool:
        prefixes = [finding.tokens] * len(texts)
        return any(2 * fires(model, watermark, prefixes, texts, gamma) >= len(texts) for watermark in key.watermarks)

    hits = tuple(finding for finding in result.found if works(finding))
    suspicious = result.suspicious
    loud = [finding for finding in hits if finding.suspicious]
    triggers = {trigger.tokens for watermark in key.watermarks for trigger in watermark.triggers}
    return Judged(
        suspicious=Rate(len(loud), len(suspicious)) if suspicious else None,
        looked_at=Rate(len(hits), max(1, len(result.found))),
        hits=hits,
        itself=any(finding.tokens in triggers for finding in loud),
    )
