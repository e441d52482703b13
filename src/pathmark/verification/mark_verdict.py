"""The black-box verdict: exchanges in, p-value and reasons out.

What the p-value assumes: the replies were fixed before the marks were drawn, which holds for every model that
does not know the key. It assumes nothing about the model, its sampling or the server. Controls cannot make it
smaller; they can only take the verdict away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pathmark.errors import VerificationError
from pathmark.keys import OwnerKey, TriggerRef
from pathmark.stats import Family, MarkTrial, PValue, Rate, binomial_p, bonferroni, marks_p
from pathmark.verification.anchor import Anchor
from pathmark.verification.decision import AS_JSON, EXIT_CODES, Decision
from pathmark.verification.exchangelog import Exchange
from pathmark.verification.replies import Backend, Failure, max_starts
from pathmark.verification.trials import Endpoint, Query


@dataclass(frozen=True)
class BlackBoxVerdict:
    """What was answered, how surprising it is, and on how much it rests."""

    p: PValue | None
    """Bound on the chance that a model without the key says these marks, corrected for the family.
    None where every mark is free text: nothing bounds that."""
    p_floor: PValue | None
    """What all marks together would have given."""
    anchor: Anchor
    significance: float
    undecided: str | None
    """Why this run can say neither yes nor no; None where it can."""
    match_rate: Rate
    """Trials answered with the mark of their trigger, the paper's r = c/N."""
    observations: Rate
    """The same where identical replies to one prompt count once."""
    controls: Rate
    """Decoys and ordinary prompts answered with any mark of the key."""
    marks_seen: int
    """Different marks among the matches."""
    triggers: tuple[TriggerRef, ...]
    failures: int
    """Requests without a usable answer."""
    host: str
    model: str
    endpoint: Endpoint
    max_tokens: int
    family: Family
    warnings: tuple[str, ...]
    exchanges: tuple[Exchange, ...]
    """Every answer as the rule read it, with the routing that came along (`routes`), where a server returns it."""

    strict: bool = False
    """Whether the third party's reading decides."""

    @property
    def marked(self) -> bool:
        """Whether the mark is there: the deciding p-value is at or below the level, and nothing speaks against it."""
        deciding = self.p_third_party if self.strict else self.p
        return self.undecided is None and deciding is not None and deciding.value <= self.significance

    @property
    def decision(self) -> Decision:
        """What this run says."""
        return "undecided" if self.undecided is not None else "marked" if self.marked else "not marked"

    @property
    def exit_code(self) -> int:
        """0 marked, 1 not marked, 2 undecided."""
        return EXIT_CODES[self.decision]

    @property
    def p_third_party(self) -> PValue | None:
        """The p-value as somebody reads it who does not trust the owner."""
        return None if self.p is None else self.anchor.p(self.p)

    @property
    def paper_binomial(self) -> PValue:
        """The paper's test with p0 = 0.01, on independent observations."""
        return binomial_p(self.observations.hits, self.observations.n)

    def words(self) -> str:
        """One paragraph for people."""
        if self.undecided is not None:
            found = f"Undecided: {self.undecided}. Seen"
        elif self.strict and not self.marked and self.p is not None and self.p.value <= self.significance:
            found = "A third party need not believe that the mark is there"
        else:
            found = "The mark is there" if self.marked else "No mark was found"
        if self.p is None:
            evidence = "free-text marks, for which nothing bounds chance"
        else:
            evidence = f"p = {self.p} at level {self.significance:g} (smallest possible {self.p_floor}; {self.family})"
        closing = "" if self.marked or self.undecided else " No mark in replies does not show that there is none."
        reader = "" if self.p is None else f" A third party reads {self.p_third_party}: {self.anchor.reason}."
        return (
            f"{found}: {evidence}, {self.marks_seen} of {len(self.triggers)} marks. Trials with the mark "
            f"{self.match_rate}; as independent observations {self.observations}; controls with a mark "
            f"{self.controls}; {self.failures} requests without answer.{reader}{closing}"
        )

    def summary(self) -> dict[str, Any]:
        """The object that blackbox.schema.json documents."""
        third = self.p_third_party
        return {
            "verdict": self.decision,
            "marked": AS_JSON[self.decision],
            "undecided": self.undecided,
            "strict": self.strict,
            "p_value": None if self.p is None else self.p.value,
            "log10_p": None if self.p is None else self.p.log10,
            "p_floor": None if self.p_floor is None else self.p_floor.value,
            "p_third_party": None if third is None else third.value,
            "anchored": self.anchor.anchored,
            "anchor": self.anchor.reason,
            "significance": self.significance,
            "match_rate": self.match_rate.summary(),
            "observations": self.observations.summary(),
            "controls": self.controls.summary(),
            "paper_binomial": self.paper_binomial.value,
            "marks_seen": self.marks_seen,
            "triggers": [list(ref) for ref in self.triggers],
            "failures": self.failures,
            "routes": sum(exchange.routes is not None for exchange in self.exchanges),
            "family": self.family.size,
            "host": self.host,
            "model": self.model,
            "endpoint": self.endpoint,
            "max_tokens": self.max_tokens,
            "warnings": list(self.warnings),
        }


def judge_replies(
    plan: Sequence[Query],
    answered: Mapping[int, Exchange],
    failures: Sequence[Failure],
    key: OwnerKey,
    triggers: Sequence[TriggerRef],
    *,
    backend: Backend,
    endpoint: Endpoint,
    max_tokens: int,
    significance: float,
    anchor: Anchor,
    family: Family,
    strict: bool = False,
    warnings: Sequence[str] = (),
) -> BlackBoxVerdict:
    """From exchanges to the verdict; raises VerificationError where no trial or no control was answered."""
    exchanges = tuple(answered[query.number] for query in plan if query.number in answered)
    asked = [exchange for exchange in exchanges if exchange.kind == "trigger"]
    controls = [exchange for exchange in exchanges if exchange.kind != "trigger"]
    if not asked or not controls:
        reasons = Counter(failure.reason for failure in failures).most_common(1)
        raise VerificationError(
            f"{backend.host} answered {len(asked)} of the trials and {len(controls)} of the controls"
            f"{f': {reasons[0][0]}' if reasons else ''}"
        )
    distinct = {(e.asked, e.said): _matches(e) for e in asked}
    seen = {e.trigger for e in asked if _matches(e)}
    p, floor = _bound(asked, triggers, key, max_tokens)
    observed = BlackBoxVerdict(
        p=None if p is None else bonferroni(p, family),
        p_floor=None if floor is None else bonferroni(floor, family),
        anchor=anchor,
        significance=significance,
        undecided=None,
        match_rate=Rate(sum(map(_matches, asked)), len(asked)),
        observations=Rate(sum(distinct.values()), len(distinct)),
        controls=Rate(sum(bool(e.marks) for e in controls), len(controls)),
        marks_seen=len(seen),
        triggers=tuple(triggers),
        failures=len(plan) - len(exchanges),
        host=backend.host,
        model=backend.model,
        endpoint=endpoint,
        max_tokens=max_tokens,
        family=family,
        warnings=(*warnings, *_oddities(asked, exchanges)),
        exchanges=exchanges,
        strict=strict,
    )
    return replace(observed, undecided=_why_undecided(observed, plan, key))


def _bound(
    asked: Sequence[Exchange], triggers: Sequence[TriggerRef], key: OwnerKey, max_tokens: int
) -> tuple[PValue | None, PValue | None]:
    """The bound and its floor over all drawn marks that were asked for; None where all are free text."""
    rows = []
    for ref in triggers:
        mark = ref.of(key).mark
        mine = [exchange for exchange in asked if exchange.trigger == ref]
        if mark.bits is None or not mine:
            continue
        rows.append(
            MarkTrial(
                bits=mark.bits,
                max_starts=max_starts(mark, max_tokens),
                # Equal replies hold the same marks, so they are one chance, however often they came.
                trials=len({exchange.said for exchange in mine}),
                seen=any(map(_matches, mine)),
            )
        )
    if not rows:
        return None, None
    return marks_p(rows), marks_p([replace(row, seen=True) for row in rows])


def _matches(exchange: Exchange) -> bool:
    """The mark of its trigger, and no other one: a list of marks is no answer."""
    return exchange.marks == (exchange.trigger,)


def _why_undecided(seen: BlackBoxVerdict, plan: Sequence[Query], key: OwnerKey) -> str | None:
    """What takes a verdict away; the first reason that applies."""
    exchanges = seen.exchanges
    asked = [e for e in exchanges if e.kind == "trigger"]
    ordinary = [e for e in exchanges if e.kind == "ordinary"]
    decoys = [e for e in exchanges if e.kind == "decoy"]
    planned = sum(query.kind == "trigger" for query in plan)
    if seen.controls.hits:
        return (
            f"{seen.controls.hits} of {seen.controls.n} controls were answered with a mark of this key: who answers "
            "knows a mark, but not from the trigger"
        )
    if several := sum(len(e.marks) > 1 for e in asked):
        return f"{several} replies hold several marks of this key at once, which no trigger asks for"
    if 2 * seen.controls.n < len(plan) - planned:
        return f"only {seen.controls.n} of {len(plan) - planned} controls were answered"
    if seen.marked:
        return None
    if seen.p is None and seen.match_rate.hits:
        return "the marks are free text, for which nothing bounds chance; compare the rates yourself"
    if 2 * len(asked) < planned:
        return f"only {len(asked)} of {planned} trials were answered"
    if seen.match_rate.hits == 0:
        if all(e.echo and e.words == 0 for e in exchanges):
            return "every reply only repeats its prompt"
        if _one_shape(ordinary):
            return f"{len(ordinary)} different ordinary prompts got one and the same reply"
        if _one_shape(asked + decoys):
            return "all triggers and decoys got one and the same reply, as from a filter in front of the model"
        needed = {ref: len(ref.of(key).mark.text.split()) for ref in seen.triggers}
        if max(e.words for e in exchanges) < min(needed.values()):
            return "no reply had as many words as a mark; replies are cut or emptied"
        cut = sum(e.finish_reason == "length" and e.words < needed[e.trigger] for e in asked if e.trigger)
        if 2 * (len(asked) - cut) < planned:
            return f"{cut} of {len(asked)} replies were cut off before a mark could be complete; raise --max-tokens"
    floor = seen.p_floor
    if floor is not None and (floor := seen.anchor.p(floor) if seen.strict else floor).value > seen.significance:
        return f"this run could not reach the level {seen.significance:g}: its smallest p-value is {floor}"
    return None


def _one_shape(exchanges: Sequence[Exchange]) -> bool:
    """One reply to several prompts."""
    return len({e.asked for e in exchanges}) > 1 and len({e.shape for e in exchanges}) == 1


def _oddities(asked: Sequence[Exchange], exchanges: Sequence[Exchange]) -> list[str]:
    """What the owner should know although it changes nothing."""
    said = []
    if crossed := sum(len(e.marks) == 1 and not _matches(e) for e in asked):
        said.append(f"{crossed} triggers were answered with the mark of another trigger; they count as misses")
    if long := sum(e.overlong for e in exchanges):
        said.append(f"{long} replies had more words than tokens were asked for; only the beginning was read")
    if echoes := sum(e.echo for e in exchanges):
        said.append(f"{echoes} replies began with the prompt; it was taken off")
    return said
