"""Which licensee's copy: every issued path against one measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pathmark.errors import VerificationError
from pathmark.keys import Issued, OwnerKey
from pathmark.stats import TraceResult, trace
from pathmark.stats.tracing import Decision
from pathmark.verdicts.criteria import Criteria
from pathmark.verdicts.wording import (
    FOUND,
    FRAMEABLE,
    NOT_FOUND,
    UNDECIDED,
    Wording,
    copy_of,
    lead,
    nobodys_copy,
    rivals,
    several_copies,
    texts_read,
)
from pathmark.verification.paths.evidence import Evidence

OWN_COPY = "(the owner's own copy)"


Named = Decision | Literal["lead"]
"""As `stats.trace` decides; `lead`: only behind the original's layers somebody stands out, and nobody is named."""


@dataclass(frozen=True)
class TracedCopy:
    """The decision, with the ids behind the names."""

    result: TraceResult
    """Of the suspect as it is."""
    ids: dict[str, int]
    """Licensee -> id."""
    n_probes: int
    n_tokens: int
    behind: TraceResult | None = None
    """Of the suspect's marked layers behind the original's lower ones, where that was asked for."""

    @property
    def decision(self) -> Named:
        """What may be said. Whoever chooses an original can make any model take any path, so that reading names nobody
        by itself."""
        alone = self.result.decision == "none" and self.behind is not None and self.behind.decision != "none"
        return "lead" if alone else self.result.decision

    def words(self) -> str:
        """The decision for people: the first screen, what would weaken it, the figures."""
        return self.wording().plain()

    def wording(self) -> Wording:
        """The same in its parts."""
        result = self.result
        best = self._called(result)
        examined = texts_read(self.n_probes, self.n_tokens)
        headline, sentences = {
            "none": (NOT_FOUND, (nobodys_copy(best, result.p),)),
            "lead": (UNDECIDED, (lead(self._called(self.behind or result)),)),
            "ambiguous": (UNDECIDED, (rivals(best, result.rival or "another licensee"),)),
            "several": (FOUND, (several_copies(best), FRAMEABLE)),
            "licensee": (FOUND, (copy_of(best, result.p), FRAMEABLE)),
        }[self.decision]
        return Wording(headline, (*sentences, examined), self._weaknesses(), self._figures())

    def _called(self, result: TraceResult) -> str:
        name = "the owner" if result.best == OWN_COPY else result.best
        return f"{name} (id {self.ids[result.best]})"

    def _weaknesses(self) -> tuple[str, ...]:
        pooled = ("two licensees who pool their copies look like this",) * (self.result.decision == "several")
        return (*pooled, "other suspects, keys or texts that were tried and are not counted here")

    def _figures(self) -> tuple[str, ...]:
        result, found = self.result, [self._strength(self.result)]
        if self.behind is not None:
            found.append(f"behind the original's lower layers {self._strength(self.behind)}")
        if result.rival is not None and result.p_against_rival is not None:
            found.append(f"p = {result.p_against_rival} if the mark of {result.rival} were in the model")
        if result.decision == "several" and result.p_rival_beside_best is not None:
            found.append(f"beside it another licensee has p = {result.p_rival_beside_best}")
        return (*found, f"{len(self.ids)} licensees compared on {self.n_probes} texts with {self.n_tokens:,} tokens")

    def _strength(self, result: TraceResult) -> str:
        margin = "" if result.margin is None else f", {result.margin:.1f} powers of ten ahead of the next"
        return f"{result.best}: p = {result.p}, charged for {result.family.size}{margin}"

    def summary(self) -> dict[str, Any]:
        """JSON object."""
        result = self.result
        named = self.decision in ("licensee", "several")
        return {
            "decision": self.decision,
            "licensee": result.best if named else None,
            "id": self.ids[result.best] if named else None,
            "p_value": result.p.value,
            "log10_p": result.p.log10,
            "margin": result.margin,
            "rival": result.rival,
            "p_against_rival": None if result.p_against_rival is None else result.p_against_rival.value,
            "p_rival_beside_best": None if result.p_rival_beside_best is None else result.p_rival_beside_best.value,
            "ranking": [{"licensee": name, "id": self.ids[name], "p_value": p.value} for name, p in result.ranking],
            "grafted": None
            if self.behind is None
            else {"decision": self.behind.decision, "best": self.behind.best, "p_value": self.behind.p.value},
            "family": result.family.summary(),
            "n_probes": self.n_probes,
            "n_tokens": self.n_tokens,
            "words": self.wording().opening(),
        }


def trace_copy(
    key: OwnerKey,
    evidence: Evidence,
    issued: Sequence[Issued],
    *,
    watermark: int = 0,
    criteria: Criteria | None = None,
    fed: Evidence | None = None,
) -> TracedCopy:
    """Hold every licensee's path, and the owner's own, against the evidence.

    Of the criteria it takes the level and the family; licensees are added to the family. `fed` is the same behind the
    original's lower layers: a second statistic, so both are charged for two.
    """
    if not issued:
        raise VerificationError("the registry is empty; `pathmark issue` allots ids")
    mark = key.watermarks[watermark]
    ids = {OWN_COPY: mark.id} | {entry.licensee: entry.id for entry in issued}
    paths = {name: list(mark.targets_for(number).values()) for name, number in ids.items()}
    criteria = criteria or Criteria()
    family = criteria.family if fed is None else replace(criteria.family, statistics=2 * criteria.family.statistics)

    def traced(seen: Evidence) -> TraceResult:
        return trace(seen.measured(key)[watermark], paths, alpha=criteria.significance, family=family)

    size = len(evidence.clean.mask_BT), evidence.clean.n_tokens
    return TracedCopy(traced(evidence), ids, *size, behind=None if fed is None else traced(fed))
