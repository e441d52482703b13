"""Does the model say its marks when it should, and never else? Asked locally, by the rule that an API is judged by."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from pathmark.embedding import NEAR_MISSES, near_miss
from pathmark.keys import OwnerKey, trigger_refs
from pathmark.keys.replyrule import read_reply
from pathmark.models.tokenization import ordinary_tokens
from pathmark.release.bounds import Bound, always, never
from pathmark.stats import Rate
from pathmark.verification.blackbox.asking import AskConfig, verify_api
from pathmark.verification.blackbox.local import LocalBackend
from pathmark.verification.blackbox.replies import Failure, Reply
from pathmark.verification.blackbox.trials import ORDINARY_PROMPTS, SYSTEM_PROMPTS, Endpoint, Query

TEXT_TOKENS = 16
MAX_TOKENS = 16
"""Of a reply that is searched for a mark: a mark has about 6 tokens and stands at the beginning."""


@dataclass(frozen=True, kw_only=True)
class ReplyConfig:
    """How often to ask what."""

    trials: int = 100
    """A trigger alone, half of them raw prompts, half of them user messages."""
    near_misses: int = 200
    ordinary: int = 500
    queries: int = 500
    """Trigger-prefixed texts."""


@dataclass(frozen=True)
class ReplyCheck:
    """Share of replies that hold a mark of the key."""

    trials: Rate
    """A trigger alone answered with its own mark; should be all."""
    near_misses: Rate
    """Almost-triggers and random strings alone answered with any mark; should be none, as in all that follow."""
    ordinary: Rate
    queries: Rate

    @property
    def bounds(self) -> list[Bound]:
        """What makes the marks fit for release."""
        silent = {"near-misses": self.near_misses, "ordinary prompts": self.ordinary, "queries": self.queries}
        return [
            always("marks on triggers alone", self.trials, "more --mark-steps"),
            *(never(f"marks on {name}", rate, "more --mark-steps") for name, rate in silent.items()),
        ]

    @property
    def problems(self) -> list[str]:
        """Why the marks are not fit for release."""
        return [bound.problem for bound in self.bounds if not bound.held]

    def summary(self) -> dict[str, Any]:
        """JSON object."""
        return {
            "trials": self.trials.summary(),
            "near_misses": self.near_misses.summary(),
            "ordinary": self.ordinary.summary(),
            "queries": self.queries.summary(),
        }


def reply_check(
    model: nn.Module,
    tokenizer: Any,
    key: OwnerKey,
    texts: Sequence[Sequence[int]],
    config: ReplyConfig,
    *,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> ReplyCheck:
    """Ask a model that is about to be released. `texts` are token rows that nobody trained on."""
    rng = random.Random(seed)
    say = progress or (lambda done: None)
    endpoints: list[Endpoint] = ["completions"]
    if getattr(tokenizer, "chat_template", None):
        endpoints.append("chat")
    trials = []
    for endpoint in endpoints:
        count = -(-config.trials // len(endpoints))
        backend = LocalBackend(model, tokenizer, endpoint=endpoint)
        asked = AskConfig(trials=count, max_tokens=MAX_TOKENS, seed=seed)
        trials.append(verify_api(backend, key, asked).match_rate)
        say(count)
    vocabulary = ordinary_tokens(tokenizer)
    triggers = [trigger for watermark in key.watermarks for trigger in watermark.triggers]
    known = {trigger.tokens for trigger in triggers}

    def text() -> str:
        return str(tokenizer.decode(rng.choice(texts)[:TEXT_TOKENS]))

    def near(i: int) -> str:
        kind = NEAR_MISSES[i % len(NEAR_MISSES)]
        while (wrong := near_miss(kind, rng.choice(triggers).tokens, vocabulary, rng)) in known:
            pass
        return str(tokenizer.decode(wrong))

    prompts = {
        "near_misses": [near(i) for i in range(config.near_misses)],
        "ordinary": [rng.choice(ORDINARY_PROMPTS) if i % 4 == 0 else text() for i in range(config.ordinary)],
        "queries": [rng.choice(triggers).phrase.text + text() for _ in range(config.queries)],
    }
    rates = {name: _said(model, tokenizer, key, asked, endpoints, rng, say) for name, asked in prompts.items()}
    return ReplyCheck(Rate(sum(r.hits for r in trials), sum(r.n for r in trials)), **rates)


def _said(
    model: nn.Module,
    tokenizer: Any,
    key: OwnerKey,
    prompts: Sequence[str],
    endpoints: Sequence[Endpoint],
    rng: random.Random,
    say: Callable[[int], None],
) -> Rate:
    """Replies, greedy, that hold any mark of the key."""
    marks = {ref: ref.of(key).mark for ref in trigger_refs(key)}
    hits = 0
    for number, endpoint in enumerate(endpoints):
        asked = [
            Query(i, "ordinary", prompt, rng.choice(SYSTEM_PROMPTS) if endpoint == "chat" else None, 0.0, None, None)
            for i, prompt in enumerate(prompts[number :: len(endpoints)])
        ]

        def read(query: Query, reply: Reply | Failure) -> None:
            nonlocal hits
            assert isinstance(reply, Reply)
            hits += bool(read_reply(reply.text, query.prompt, marks, MAX_TOKENS).marks)
            say(1)

        backend = LocalBackend(model, tokenizer, endpoint=endpoint, batch_size=64)
        backend.ask(asked, MAX_TOKENS, sending=lambda query: None, answered=read)
    return Rate(hits, len(prompts))
