"""Which licensee's copy: every issued path against one measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pathmark.errors import VerificationError
from pathmark.keys import Issued, OwnerKey
from pathmark.stats import TraceResult, trace
from pathmark.verification.criteria import Criteria
from pathmark.verification.paths.evidence import Evidence

OWN_COPY = "(the owner's own copy)"


@dataclass(frozen=True)
class TracedCopy:
    """The decision, with the ids behind the names."""

    result: TraceResult
    ids: dict[str, int]
    """Licensee -> id."""
    n_probes: int
    n_tokens: int

    def words(self) -> str:
        """One paragraph for people."""
        result = self.result
        base = f"{len(self.ids)} licensees compared on {self.n_probes} texts with {self.n_tokens:,} tokens"
        if result.decision == "none":
            return f"Nobody's mark was found: the strongest is {result.best} with p = {result.p} ({base})."
        margin = "" if result.margin is None else f", {result.margin:.1f} powers of ten ahead of the next"
        named = f"{result.best} (id {self.ids[result.best]}): p = {result.p}, charged for {result.family.size}{margin}"
        if result.decision == "ambiguous":
            return (
                f"Marked, but nobody can be named: {named}; if {result.rival}'s mark were in the model, p would be "
                f"{result.p_against_rival} ({base})."
            )
        if result.decision == "several":
            return (
                f"More than one copy went into this model. Strongest: {named}; beside it another licensee has "
                f"p = {result.p_rival_beside_best} ({base}). Two licensees who pool their copies look like this."
            )
        held = "" if result.rival is None else f"; p = {result.p_against_rival} if {result.rival}'s were in the model"
        return f"This is the copy of {named}{held} ({base})."

    def summary(self) -> dict[str, Any]:
        """JSON object."""
        result = self.result
        named = result.decision in ("licensee", "several")
        return {
            "decision": result.decision,
            "licensee": result.best if named else None,
            "id": self.ids[result.best] if named else None,
            "p_value": result.p.value,
            "log10_p": result.p.log10,
            "margin": result.margin,
            "rival": result.rival,
            "p_against_rival": None if result.p_against_rival is None else result.p_against_rival.value,
            "p_rival_beside_best": None if result.p_rival_beside_best is None else result.p_rival_beside_best.value,
            "ranking": [{"licensee": name, "id": self.ids[name], "p_value": p.value} for name, p in result.ranking],
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
) -> TracedCopy:
    """Hold every licensee's path, and the owner's own, against the evidence.

    Of the criteria it takes the level and the family; licensees are added to the family.
    """
    if not issued:
        raise VerificationError("the registry is empty; `pathmark issue` allots ids")
    mark = key.watermarks[watermark]
    ids = {OWN_COPY: mark.id} | {entry.licensee: entry.id for entry in issued}
    paths = {name: list(mark.targets_for(number).values()) for name, number in ids.items()}
    criteria = criteria or Criteria()
    result = trace(evidence.measured(key)[watermark], paths, alpha=criteria.significance, family=criteria.family)
    return TracedCopy(result, ids, len(evidence.clean.mask_BT), evidence.clean.n_tokens)
