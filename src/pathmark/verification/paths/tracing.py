"""Which licensee's copy: every issued path against one measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pathmark.errors import VerificationError
from pathmark.keys import Issued, OwnerKey
from pathmark.stats import TraceResult, trace
from pathmark.stats.tracing import Decision
from pathmark.verification.criteria import Criteria
from pathmark.verification.paths.evidence import Evidence

OWN_COPY = "(the owner's own copy)"


FRAMEABLE = (
    "The owner could have made any licensee's copy: this tells the owner where to look, and proves to nobody else that "
    "the licensee passed it on."
)
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
        """One paragraph for people."""
        result = self.result
        base = f"{len(self.ids)} licensees compared on {self.n_probes} texts with {self.n_tokens:,} tokens"
        if result.decision == "none":
            nobody = f"Nobody's mark was found: the strongest is {result.best} with p = {result.p} ({base})."
            return nobody if self.behind is None or self.decision == "none" else f"{nobody} {self._lead(self.behind)}"
        named = self._named(result)
        if result.decision == "ambiguous":
            return (
                f"Marked, but nobody can be named: {named}; if {result.rival}'s mark were in the model, p would be "
                f"{result.p_against_rival} ({base})."
            )
        if result.decision == "several":
            return (
                f"More than one copy went into this model. Strongest: {named}; beside it another licensee has "
                f"p = {result.p_rival_beside_best} ({base}). Two licensees who pool their copies look like this. "
                f"{FRAMEABLE}"
            )
        held = "" if result.rival is None else f"; p = {result.p_against_rival} if {result.rival}'s were in the model"
        return f"This is the copy of {named}{held} ({base}). {FRAMEABLE}"

    def _named(self, result: TraceResult) -> str:
        margin = "" if result.margin is None else f", {result.margin:.1f} powers of ten ahead of the next"
        return f"{result.best} (id {self.ids[result.best]}): p = {result.p}, charged for {result.family.size}{margin}"

    def _lead(self, behind: TraceResult) -> str:
        return (
            f"Behind the original's lower layers its marked layers look like the copy of {self._named(behind)}. That "
            "is a lead and names nobody: whoever chooses the original can make any model take any path."
        )

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
            "words": self.words(),
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
