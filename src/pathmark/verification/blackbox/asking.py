"""Black-box verification: triggers alone to whoever answers, replies in, verdict out."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pathmark.errors import VerificationError
from pathmark.keys import Ledger, OwnerKey, TextCodec, TriggerRef, trigger_refs
from pathmark.keys.rederive import underivable
from pathmark.progress import Progress, Silent
from pathmark.verdicts.criteria import Criteria
from pathmark.verification.blackbox.exchangelog import Digester, Exchange, ExchangeLog, plan_digest, read_exchange
from pathmark.verification.blackbox.judging import Heard, ReplyVerdict, judge_replies
from pathmark.verification.blackbox.replies import Backend, Failure, Reply
from pathmark.verification.blackbox.trials import Endpoint, Query, plan_queries

LIVE_TRIGGERS: Final = 3
"""Triggers that one live run discloses at most, unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class AskConfig:
    """How much is asked, and how."""

    trials: int = 50
    """Requests with a trigger; about as many controls come along."""
    max_tokens: int = 64
    """Of a reply, and as many words are read."""
    seed: int = 0
    triggers: int | tuple[TriggerRef, ...] | None = None
    """How many to use or which. None: half of the unused ones, at most three; all of them where nobody else sees
    them."""
    redact: bool = False
    """Whether the log holds digests in the place of prompts and replies."""

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise VerificationError(f"at least one trial is needed, got {self.trials}; 50 is the default")
        if self.max_tokens < 1:
            raise VerificationError(f"a reply has at least one token, got max_tokens {self.max_tokens}; try 64")
        if self.triggers is not None and (self.triggers if isinstance(self.triggers, int) else len(self.triggers)) < 1:
            raise VerificationError(f"at least one trigger is needed, got {self.triggers}")


UNCHECKED: Final = (
    "the tokenizer that the key names is not at hand, so nobody has checked how many marks could have been drawn"
)

REPLAYED: Final = (
    "replies were taken from a log that was there before, and whoever claims the mark could have written any; ask "
    "everything in one run, or without a log"
)


def verify_api(
    backend: Backend,
    key: OwnerKey,
    config: AskConfig | None = None,
    *,
    criteria: Criteria | None = None,
    codec: TextCodec | None = None,
    ledger: Ledger | None = None,
    log: Path | str | None = None,
    progress: Progress | None = None,
) -> ReplyVerdict:
    """Ask, read the replies by the rule that `replies` fixes, and judge.

    `codec`: the tokenizer whose words decoys are made of, the bundled one by default. `ledger` keeps which triggers
    were disclosed to whom. `log`: file of all exchanges; a run that finds its own goes on there; a third party takes
    nothing from what it found.
    """
    config = config or AskConfig()
    run = _Run(backend, key, config, ledger if backend.discloses else None)
    with ExchangeLog(log, redact=config.redact) if log is not None else contextlib.nullcontext() as book:
        if book is not None and book.header is not None:
            refs, endpoint = _from_header(book, key)
        else:
            endpoint = backend.prepare()
            refs = run.choose()
        words = codec or _bundled_codec()
        checked = _checked(key, words)
        plan = plan_queries(key, refs, words, trials=config.trials, seed=config.seed, endpoint=endpoint)
        _refuse_leaks(plan, key)
        if book is not None:
            book.begin(
                {
                    "fingerprint": key.fingerprint,
                    "host": backend.host,
                    "model": backend.model,
                    "endpoint": endpoint,
                    "trials": config.trials,
                    "max_tokens": config.max_tokens,
                    "seed": config.seed,
                    "triggers": [list(ref) for ref in refs],
                    "plan": plan_digest(plan, Digester(key)),
                }
            )
        run.ask(plan, endpoint, book, progress or Silent())
    heard = Heard(
        plan=plan, answered=run.answered, failures=run.failures, triggers=refs, host=backend.host, model=backend.model,
        endpoint=endpoint, max_tokens=config.max_tokens, warnings=tuple(run.warnings),
    )  # fmt: skip
    settled = (criteria or Criteria()).of(key)
    assert settled.anchor is not None
    replayed = book is not None and bool(book.answered)
    for wrong, reason in ((replayed, REPLAYED), (not checked, UNCHECKED)):
        if wrong:
            settled = replace(settled, anchor=settled.anchor.withheld(reason))
    return judge_replies(key, heard, settled)


def _checked(key: OwnerKey, codec: TextCodec) -> bool:
    """Whether triggers and marks were drawn again with the key's tokenizer; a key that does not follow is refused."""
    if codec.digest != key.model.tokenizer_digest:
        return False
    if wrong := underivable(key, codec):
        raise VerificationError(f"this key does not follow from its secret ({wrong[0]}); its replies prove nothing")
    return True


class _Run:
    """State of one run: who is asked, what came back."""

    def __init__(self, backend: Backend, key: OwnerKey, config: AskConfig, ledger: Ledger | None) -> None:
        self.backend, self.key, self.config, self.ledger = backend, key, config, ledger
        self.marks = {ref: ref.of(key).mark for ref in trigger_refs(key)}
        self.answered: dict[int, Exchange] = {}
        self.failures: list[Failure] = []
        self.warnings: list[str] = []

    def choose(self) -> tuple[TriggerRef, ...]:
        """Triggers for this run, entered in the ledger before anything is sent."""
        wanted = self.config.triggers
        if isinstance(wanted, tuple):
            for ref in wanted:
                ref.of(self.key)
            return wanted
        every = trigger_refs(self.key)
        if wanted is None:
            unused = len(self.ledger.unused_triggers(self.key)) if self.ledger else len(every)
            wanted = max(1, min(LIVE_TRIGGERS, (unused + 1) // 2)) if self.backend.discloses else len(every)
        wanted = min(wanted, self.config.trials, len(every))
        if self.ledger is None:
            return tuple(every[:wanted])
        taken = self.ledger.take(self.key, wanted, host=self.backend.host, model=self.backend.model)
        self.warnings += taken.warnings()
        return taken.triggers

    def ask(self, plan: tuple[Query, ...], endpoint: Endpoint, book: ExchangeLog | None, progress: Progress) -> None:
        """Ask what the log does not answer yet."""
        progress.stage("asking", len(plan))
        numbers = {query.number for query in plan}
        self.answered = {n: e for n, e in (book.answered if book else {}).items() if n in numbers}
        progress.advance(len(self.answered))
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
                exchange = read_exchange(query, outcome, self.marks, self.config.max_tokens, digest)
                if book is not None:
                    book.answer(query, outcome, exchange)
                self.answered[query.number] = exchange
            progress.advance(1)

        pending = [query for query in plan if query.number not in self.answered]
        if not pending:
            return
        if book is not None and book.resumed and (now := self.backend.prepare()) != endpoint:
            raise VerificationError(f"the log is of the {endpoint} endpoint, {self.backend.host} answers at {now}")
        self.backend.ask(pending, self.config.max_tokens, sending=sending, answered=answered)


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
