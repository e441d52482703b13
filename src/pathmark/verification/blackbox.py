"""Black-box verification: triggers alone to whoever answers, replies in, verdict out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pathmark.errors import VerificationError
from pathmark.keys import Ledger, OwnerKey, TextCodec, TriggerRef, trigger_refs
from pathmark.stats import Family
from pathmark.verification.anchor import Anchor, judge_anchor
from pathmark.verification.exchangelog import Digester, Exchange, ExchangeLog, plan_digest, read_exchange
from pathmark.verification.mark_verdict import BlackBoxVerdict, judge_replies
from pathmark.verification.replies import Backend, Failure, Reply
from pathmark.verification.trials import Endpoint, Query, plan_queries

LIVE_TRIGGERS: Final = 3
"""Triggers that one live run discloses at most, unless told otherwise."""


def verify_api(
    backend: Backend,
    key: OwnerKey,
    *,
    trials: int = 50,
    max_tokens: int = 64,
    seed: int = 0,
    triggers: int | Sequence[TriggerRef] | None = None,
    codec: TextCodec | None = None,
    ledger: Ledger | None = None,
    log: Path | str | None = None,
    redact: bool = False,
    anchor: Anchor | None = None,
    family: Family | None = None,
    significance: float = 1e-6,
    strict: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> BlackBoxVerdict:
    """Ask, read the replies by the rule that `replies` fixes, and judge.

    `triggers`: how many to use or which; by default half of the unused ones, at most three, and all of them
    where nobody else sees them. `codec`: the tokenizer whose words decoys are made of, the bundled one by default.
    `log`: file of all exchanges; a run that finds its own goes on there. `strict`: the third party's p-value decides.
    `progress(done, total)`.
    """
    if max_tokens < 1 or not 0 < significance < 1:
        raise VerificationError(f"expected max_tokens >= 1 and a level in (0, 1), got {max_tokens}, {significance}")
    run = _Run(backend, key, max_tokens, ledger if backend.discloses else None)
    with ExchangeLog(log, redact=redact) if log is not None else contextlib.nullcontext() as book:
        if book is not None and book.header is not None:
            refs, endpoint = _from_header(book, key)
        else:
            endpoint = backend.prepare()
            refs = run.choose(triggers, trials)
        plan = plan_queries(key, refs, codec or _bundled_codec(), trials=trials, seed=seed, endpoint=endpoint)
        _refuse_leaks(plan, key)
        if book is not None:
            book.begin(
                {
                    "fingerprint": key.fingerprint,
                    "host": backend.host,
                    "model": backend.model,
                    "endpoint": endpoint,
                    "trials": trials,
                    "max_tokens": max_tokens,
                    "seed": seed,
                    "triggers": [list(ref) for ref in refs],
                    "plan": plan_digest(plan, Digester(key)),
                }
            )
        run.ask(plan, endpoint, book, progress)
    return judge_replies(
        plan, run.answered, run.failures, key, refs,
        backend=backend, endpoint=endpoint, max_tokens=max_tokens, significance=significance,
        anchor=anchor or judge_anchor(key), family=family or Family(), strict=strict, warnings=run.warnings,
    )  # fmt: skip


class _Run:
    """State of one run: who is asked, what came back."""

    def __init__(self, backend: Backend, key: OwnerKey, max_tokens: int, ledger: Ledger | None) -> None:
        self.backend, self.key, self.max_tokens, self.ledger = backend, key, max_tokens, ledger
        self.marks = {ref: ref.of(key).mark for ref in trigger_refs(key)}
        self.answered: dict[int, Exchange] = {}
        self.failures: list[Failure] = []
        self.warnings: list[str] = []

    def choose(self, wanted: int | Sequence[TriggerRef] | None, trials: int) -> tuple[TriggerRef, ...]:
        """Triggers for this run, entered in the ledger before anything is sent."""
        if trials < 1:
            raise VerificationError(f"at least one trial is needed, got {trials}; 50 is the default")
        if wanted is not None and not isinstance(wanted, int):
            for ref in wanted:
                ref.of(self.key)
            return tuple(wanted)
        every = trigger_refs(self.key)
        if wanted is None:
            unused = len(self.ledger.unused_triggers(self.key)) if self.ledger else len(every)
            wanted = max(1, min(LIVE_TRIGGERS, (unused + 1) // 2)) if self.backend.discloses else len(every)
        wanted = min(wanted, trials, len(every))
        if self.ledger is None:
            return tuple(every[:wanted])
        taken = self.ledger.take(self.key, wanted, host=self.backend.host, model=self.backend.model)
        self.warnings += taken.warnings()
        return taken.triggers

    def ask(
        self,
        plan: tuple[Query, ...],
        endpoint: Endpoint,
        book: ExchangeLog | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """Ask what the log does not answer yet."""
        numbers = {query.number for query in plan}
        self.answered = {n: e for n, e in (book.answered if book else {}).items() if n in numbers}
        digest = Digester(self.key)

        def sending(query: Query) -> None:
            if self.ledger is not None and query.trigger is not None:
                self.ledger.record(self.key, query.trigger, host=self.backend.host, model=self.backend.model)

        def answered(query: Query, outcome: Reply | Failure) -> None:
            if isinstance(outcome, Failure):
                self.failures.append(outcome)
                if book is not None:
                    book.failure(query, outcome)
            else:
                exchange = read_exchange(query, outcome, self.marks, self.max_tokens, digest)
                if book is not None:
                    book.answer(query, outcome, exchange)
                self.answered[query.number] = exchange
            if progress is not None:
                progress(len(self.answered) + len(self.failures), len(plan))

        pending = [query for query in plan if query.number not in self.answered]
        if not pending:
            return
        if book is not None and book.resumed and (now := self.backend.prepare()) != endpoint:
            raise VerificationError(f"the log is of the {endpoint} endpoint, {self.backend.host} answers at {now}")
        self.backend.ask(pending, self.max_tokens, sending=sending, answered=answered)


def _refuse_leaks(plan: Sequence[Query], key: OwnerKey) -> None:
    """A mark that stands in something we send would come back from any echo."""
    sent = {text for query in plan for text in (query.prompt, query.system) if text}
    for ref in trigger_refs(key):
        if any(ref.of(key).mark.text in text for text in sent):
            raise VerificationError(f"the mark of trigger {ref} is part of a prompt; an echo would count as a match")


def _from_header(book: ExchangeLog, key: OwnerKey) -> tuple[tuple[TriggerRef, ...], Endpoint]:
    """Triggers and endpoint of the run that began a log."""
    assert book.header is not None
    if book.header.get("fingerprint") != key.fingerprint:
        raise VerificationError(f"the log {book.path} belongs to key {book.header.get('fingerprint')}")
    try:
        refs = tuple(TriggerRef(int(w), int(n)) for w, n in book.header["triggers"])
        endpoint: Endpoint = "chat" if book.header["endpoint"] == "chat" else "completions"
    except (KeyError, TypeError, ValueError):
        raise VerificationError(f"the log {book.path} has a damaged first line; start a new one") from None
    return refs, endpoint


def _bundled_codec() -> TextCodec:
    from pathmark.models import load_tokenizer
    from pathmark.models.tokenization import HFTextCodec

    return HFTextCodec(load_tokenizer("bundled:tiny"))
