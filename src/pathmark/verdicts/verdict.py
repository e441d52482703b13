"""What every verdict is, whatever was examined: a p-value, who may rely on it, and one of three ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Final, Literal

from pathmark.stats import PValue
from pathmark.verdicts.claims import Anchor
from pathmark.verdicts.criteria import Criteria
from pathmark.verdicts.wording import (
    FOUND,
    NO_PROOF,
    NOT_FOUND,
    STILL_SMALL,
    UNDECIDED,
    Wording,
    found_by_chance,
    not_reached,
    owner_only,
    reliance,
    too_little,
)

Decision = Literal["marked", "not marked", "undecided"]
_EXIT_CODES: Final[dict[Decision, int]] = {"marked": 0, "not marked": 1, "undecided": 2}
HEADLINES: Final[dict[Decision, str]] = {"marked": FOUND, "not marked": NOT_FOUND, "undecided": UNDECIDED}
_AS_JSON: Final[dict[Decision, bool | None]] = {"marked": True, "not marked": False, "undecided": None}


@dataclass(frozen=True, kw_only=True)
class Verdict(ABC):
    """The core of `PathVerdict` (routing evidence) and `ReplyVerdict` (replies): same names, same JSON."""

    p: PValue | None
    """The owner's p-value, corrected for the family; None where nothing bounds chance."""
    p_floor: PValue | None
    """The smallest one that this key could have reached here."""
    criteria: Criteria
    """What it was judged by, with its anchor."""
    undecided: str | None = None
    """Why neither yes nor no can be said; None where it can."""
    notes: tuple[str, ...] = ()
    """What could not be done or looked odd, and why."""

    @property
    def anchor(self) -> Anchor:
        """Whether a third party may take p at face value, and what it is charged otherwise."""
        assert self.criteria.anchor is not None, "judges use Criteria.of(key)"
        return self.criteria.anchor

    @property
    def p_third_party(self) -> PValue | None:
        """What somebody may believe who does not know that the key was not ground."""
        return None if self.p is None else self.anchor.p(self.p)

    @property
    def marked(self) -> bool:
        """Whether the deciding p-value is at or below the level, and nothing takes the verdict away."""
        deciding = self.p_third_party if self.criteria.strict else self.p
        return self.undecided is None and deciding is not None and deciding.value <= self.criteria.significance

    @property
    def decision(self) -> Decision:
        """One of three ends."""
        return "undecided" if self.undecided is not None else "marked" if self.marked else "not marked"

    @property
    def exit_code(self) -> int:
        """0 marked, 1 not marked, 2 undecided."""
        return _EXIT_CODES[self.decision]

    def words(self) -> str:
        """The verdict for people: the first screen, what would weaken it, the figures."""
        return self.wording().plain()

    def wording(self) -> Wording:
        """The same in its parts."""
        return Wording(HEADLINES[self.decision], self._sentences(), tuple(self.weaknesses()), tuple(self._figures()))

    def _sentences(self) -> tuple[str, ...]:
        if self.undecided is not None:
            return f"Nobody can say yes or no: {self.undecided}.", not_reached(self.p), self._examined()
        if self.marked:
            return found_by_chance(self.p), self._reliance(), self._examined()
        if self.p is not None and self._seen_by_owner:
            return owner_only(self.p, self._missing()), self._examined()
        return too_little(self.p, self.criteria.significance), self._no_proof(), self._examined()

    @property
    def _seen_by_owner(self) -> bool:
        """Whether the owner's own reading reaches the level, whoever decides."""
        return self.p is not None and self.p.value <= self.criteria.significance

    def _reliance(self) -> str:
        """Who may rely on a mark that was found."""
        third, anchor = self.p_third_party, self.anchor
        others = third is not None and third.value <= self.criteria.significance
        reason = self._missing()
        if others and third is not None:
            reason = anchor.reason if anchor.anchored else STILL_SMALL.format(third.odds)
        return reliance(reason, others=others, private=anchor.private)

    def _missing(self) -> str:
        """Why somebody else need not believe it."""
        return self.anchor.reason

    def _no_proof(self) -> str:
        """What a mark that was not found does not say."""
        return NO_PROOF

    @abstractmethod
    def _examined(self) -> str:
        """What was looked at, in one sentence."""

    def _figures(self) -> list[str]:
        """The numbers behind the sentences, one line each."""
        if self.p is None:
            return []
        own = f"p = {self.p} at level {self.criteria.significance:g} (smallest possible {self.p_floor}"
        charged = "" if self.anchor.anchored else f", charged {self.anchor.charge_bits} bits"
        third = "nothing to go by" if self.anchor.private else f"p = {self.p_third_party}{charged}"
        return [f"{own}; {self.criteria.family})", f"for a third party {third}: {self.anchor.reason}"]

    def weaknesses(self) -> list[str]:
        """What would weaken this verdict, in words."""
        found = list(self.notes)
        if not self.anchor.anchored and (self._seen_by_owner or self.undecided is not None):
            lacking = "this proves nothing" if self.anchor.private else "the key has no proven date"
            found.append(f"for all but the owner, {lacking}: {self.anchor.reason}")
        return [*found, "other suspects, keys or texts that were tried and are not counted here"]

    def summary(self) -> dict[str, Any]:
        """JSON object; `core` in verify.schema.json and blackbox.schema.json. Each kind adds its own keys."""
        third = self.p_third_party
        return {
            "verdict": self.decision,
            "marked": _AS_JSON[self.decision],
            "undecided": self.undecided,
            "p_value": None if self.p is None else self.p.value,
            "log10_p": None if self.p is None else self.p.log10,
            "p_floor": None if self.p_floor is None else self.p_floor.value,
            "p_third_party": None if third is None else third.value,
            "anchored": self.anchor.anchored,
            "anchor": {"reason": self.anchor.reason, "charge_bits": self.anchor.charge_bits},
            "strict": self.criteria.strict,
            "significance": self.criteria.significance,
            "family": self.criteria.family.summary(),
            "words": self.wording().opening(),
            "weaknesses": self.weaknesses(),
        }
