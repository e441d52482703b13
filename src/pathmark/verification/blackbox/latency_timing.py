"""Who is timed, and how: requests one after the other, pairs that count, and a log from which a run goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pathmark.errors import VerificationError
from pathmark.keys import TriggerRef
from pathmark.progress import Progress
from pathmark.stats import log_ratios
from pathmark.verification.blackbox.api import ApiClient
from pathmark.verification.blackbox.latency_plan import LatencyPlan, Pair
from pathmark.verification.blackbox.replies import Failure, Reply
from pathmark.verification.blackbox.trials import Query

Answered = Callable[[int, "Timed"], None]
Ask = Callable[[Sequence[str], int, Answered], None]
"""Sends prompts one after the other with max_tokens, and tells each one's place and time as it is answered."""


@dataclass(frozen=True)
class Timed:
    """One request: its seconds, or why it does not count."""

    seconds: float = 0.0
    trouble: str | None = None


@dataclass(frozen=True)
class Timings:
    """Pairs that count, and how many don't."""

    triggered: tuple[float, ...]
    clean: tuple[float, ...]
    dropped: int
    """A request failed, or a reply ended early, so that the two are not equally long."""

    @property
    def ratios(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Log ratios, one per pair."""
        return log_ratios(self.triggered, self.clean)


class LatencyLog:
    """Times of finished pairs as JSON lines, so that an interrupted run goes on. Holds no prompts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = [line for line in self._read() if isinstance(line, dict)]

    @property
    def trigger(self) -> TriggerRef | None:
        """The trigger of the run that began this log; None for a new one."""
        return TriggerRef(*self._lines[0]["trigger"]) if self._lines else None

    def begin(self, plan: LatencyPlan) -> None:
        """Bind a new log to a plan, or make sure that an old one belongs to it."""
        if not self._lines:
            self._append({"plan": plan.digest, "trigger": list(plan.trigger)})
        elif self._lines[0].get("plan") != plan.digest:
            raise VerificationError(f"{self.path} belongs to a run with other settings; choose another --log")

    def known(self, stage: str) -> dict[int, dict[str, Any]]:
        """Finished pairs of a stage, by number."""
        return {line["pair"]: line for line in self._lines[1:] if line.get("stage") == stage}

    def add(self, stage: str, number: int, times: dict[str, Any]) -> None:
        """One finished pair, on disk before the next one starts."""
        self._append({"stage": stage, "pair": number, **times})

    def _append(self, line: dict[str, Any]) -> None:
        self._lines.append(line)
        with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _read(self) -> Iterator[Any]:
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:  # a crash in the middle of a line; what comes next starts on its own line
            self.path.write_bytes(whole)
        for line in whole.splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                raise VerificationError(f"{self.path} is no log of this command; choose another --log") from None


def measure_pairs(
    ask: Ask, plan: LatencyPlan, stage: str, *, log: LatencyLog | None = None, progress: Progress | None = None
) -> Timings:
    """Time the pairs of a stage, `calibration` or `pairs`, that the log does not know yet."""
    pairs: tuple[Pair, ...] = getattr(plan, stage)
    book = {} if log is None else log.known(stage)
    left = [pair for pair in pairs if pair.number not in book]
    waiting: dict[int, Timed] = {}

    def answered(place: int, timed: Timed) -> None:
        pair = left[place // 2]
        if place % 2 == 0:
            waiting[place] = timed
            return
        first, second = waiting.pop(place - 1), timed
        triggered, clean = (first, second) if pair.triggered_first else (second, first)
        trouble = triggered.trouble or clean.trouble
        times = {"trouble": trouble} if trouble else {"triggered": triggered.seconds, "clean": clean.seconds}
        book[pair.number] = times
        if log is not None:
            log.add(stage, pair.number, times)
        if progress is not None:
            progress.advance(1)

    if left:
        ask([*plan.warmup, *(prompt for pair in left for prompt in pair.prompts)], plan.max_tokens,
            lambda place, timed: answered(place - len(plan.warmup), timed) if place >= len(plan.warmup) else None,
        )  # fmt: skip
    good = [line for number, line in sorted(book.items()) if "trouble" not in line]
    if len(good) < len(pairs) / 2:
        reason = next((line["trouble"] for line in book.values() if "trouble" in line), "nothing was answered")
        raise VerificationError(f"only {len(good)} of {len(pairs)} pairs could be timed ({reason})")
    return Timings(
        tuple(line["triggered"] for line in good), tuple(line["clean"] for line in good), len(pairs) - len(good)
    )


def through_api(client: ApiClient) -> Ask:
    """Times requests over HTTP, one at a time on one connection. A retried request would have waited: it is dropped."""
    if client.settings.concurrency != 1 or client.settings.retries:
        raise VerificationError(
            "latency needs ApiSettings(concurrency=1, retries=0): requests must not overlap or wait"
        )

    def ask(prompts: Sequence[str], max_tokens: int, answered: Answered) -> None:
        queries = [Query(place, "ordinary", prompt) for place, prompt in enumerate(prompts)]
        begun: dict[int, float] = {}

        def sending(query: Query) -> None:
            begun[query.number] = time.perf_counter()

        def heard(query: Query, outcome: Reply | Failure) -> None:
            seconds = time.perf_counter() - begun.pop(query.number)
            trouble = outcome.reason if isinstance(outcome, Failure) else None
            if isinstance(outcome, Reply) and max_tokens > 1 and outcome.finish_reason not in (None, "length"):
                trouble = f"a reply ended before {max_tokens} tokens; --max-tokens 1 avoids that"
            answered(query.number, Timed(seconds, trouble))

        client.ask(queries, max_tokens, sending=sending, answered=heard)

    return ask
