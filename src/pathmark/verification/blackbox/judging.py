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
from pathmark.keys.replyrule import max_starts
from pathmark.stats import MarkTrial, PValue, Rate, binomial_p, bonferroni, marks_p
from pathmark.verdicts.criteria import Criteria
from pathmark.verdicts.verdict import Verdict
from pathmark.verdicts.wording import NO_MARK_IN_REPLIES, replies_read
from pathmark.verification.blackbox.exchangelog import Exchange
from pathmark.verification.blackbox.replies import Failure
from pathmark.verification.blackbox.trials import Endpoint, Query


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A finished run: what was asked of whom, and what came back."""

    plan: tuple[Query, ...]
    answered: Mapping[int, Exchange]
    """By number of the query."""
    failures: Sequence[Failure]
    triggers: tuple[TriggerRef, ...]
    host: str
    model: str
    endpoint: Endpoint
    max_tokens: int
    warnings: tuple[str, ...] = ()
    """What the ledger had to say."""


@dataclass(frozen=True, kw_only=True)
class ReplyVerdict(Verdict):
    """What was answered, how surprising it is, and on how much it rests.

    p bounds the chance that a model without the key says these marks, p_floor is what all of them would have given;
    both are None where every trigger or mark is free text.
    """

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
    exchanges: tuple[Exchange, ...]
    """Every answer as the rule read it, with the routing that came along (`routes`), where a server returns it."""

    @property
    def paper_binomial(self) -> PValue:
        """The paper's test with p0 = 0.01, on independent observations."""
        return binomial_p(self.observations.hits, self.observations.n)

    def _examined(self) -> str:
        return replies_read(self.host, self.model, self.match_rate.n, self.controls.n)

    def _no_proof(self) -> str:
        return NO_MARK_IN_REPLIES

    def _figures(self) -> list[str]:
        return [
            *super()._figures(),
            f"{self.marks_seen} of {len(self.triggers)} marks were seen; trials with the mark {self.match_rate}",
            f"as independent observations {self.observations}; controls with a mark {self.controls}",
            f"{self.failures} requests without answer",
        ]

    def summary(self) -> dict[str, Any]:
        """The object that blackbox.schema.json documents."""
        return {
            **super().summary(),
            "match_rate": self.match_rate.summary(),
            "observations": self.observations.summary(),
            "controls": self.controls.summary(),
            "paper_binomial": self.paper_binomial.value,
            "marks_seen": self.marks_seen,
            "triggers": [list(ref) for ref in self.triggers],
            "failures": self.failures,
            "routes": sum(exchange.routes is not None for exchange in self.exchanges),
            "host": self.host,
            "model": self.model,
            "endpoint": self.endpoint,
            "max_tokens": self.max_tokens,
        }


def judge_replies(key: OwnerKey, heard: Heard, criteria: Criteria | None = None) -> ReplyVerdict:
    """From exchanges to the verdict; raises VerificationError where no trial or no control was answered."""
    settled = (criteria or Criteria()).of(key)
    exchanges = tuple(heard.answered[query.number] for query in heard.plan if query.number in heard.answered)
    asked = [exchange for exchange in exchanges if exchange.kind == "trigger"]
    controls = [exchange for exchange in exchanges if exchange.kind != "trigger"]
    if not asked or not controls:
        reasons = Counter(failure.reason for failure in heard.failures).most_common(1)
        raise VerificationError(
            f"{heard.host} answered {len(asked)} of the trials and {len(controls)} of the controls"
            f"{f': {reasons[0][0]}' if reasons else ''}"
        )
    distinct = {(e.asked, e.said): _matches(e) for e in asked}
    p, floor = _bound(asked, heard.triggers, key, heard.max_tokens)
    observed = ReplyVerdict(
        p=None if p is None else bonferroni(p, settled.family),
        p_floor=None if floor is None else bonferroni(floor, settled.family),
        criteria=settled,
        notes=(*heard.warnings, *_oddities(asked, exchanges)),
        match_rate=Rate(sum(map(_matches, asked)), len(asked)),
        observations=Rate(sum(distinct.values()), len(distinct)),
        controls=Rate(sum(bool(e.marks) for e in controls), len(controls)),
        marks_seen=len({e.trigger for e in asked if _matches(e)}),
        triggers=heard.triggers,
        failures=len(heard.plan) - len(exchanges),
        host=heard.host,
        model=heard.model,
        endpoint=heard.endpoint,
        max_tokens=heard.max_tokens,
        exchanges=exchanges,
    )
    return replace(observed, undecided=_why_undecided(observed, heard.plan, key))


def _bound(
    asked: Sequence[Exchange], triggers: Sequence[TriggerRef], key: OwnerKey, max_tokens: int
) -> tuple[PValue | None, PValue | None]:
    """The bound and its floor over all marks that chance is bounded for (`Trigger.mark_bits`); None without any."""
    rows = []
    for ref in triggers:
        trigger = ref.of(key)
        mine = [exchange for exchange in asked if exchange.trigger == ref]
        if trigger.mark_bits is None or not mine:
            continue
        rows.append(
            MarkTrial(
                bits=trigger.mark_bits,
                max_starts=max_starts(trigger.mark, max_tokens),
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


def _why_undecided(seen: ReplyVerdict, plan: Sequence[Query], key: OwnerKey) -> str | None:
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
        return "triggers or marks are free text, for which nothing bounds chance; compare the rates yourself"
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
    level, floor = seen.criteria.significance, seen.p_floor
    if floor is not None and (floor := seen.criteria.deciding(floor)).value > level:
        return f"this run could not reach the level {level:g}: its smallest p-value is {floor}"
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
