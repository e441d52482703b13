"""The latency channel: do requests with the trigger take longer than the same requests with another prefix?

Corroboration only. A slow trigger is what concentrated routing looks like from outside on a model whose experts
are spread over devices; it is no secret that only the owner could have put there, and proves no ownership.

A pair is one text behind the trigger and behind a decoy of as many tokens, sent in an order that a coin decides.
Before the trigger is sent at all, calibration pairs (a decoy that plays the trigger, against the other decoys)
show how noisy the server is, what the planned pairs could detect, and whether the server minds a prefix that comes
again and again. A run that could not see the effect asked for ends there, with the trigger undisclosed.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from pathmark.errors import VerificationError
from pathmark.keys import OwnerKey, TextCodec, TriggerRef
from pathmark.stats import (
    LatencyEffect,
    PValue,
    detectable_effect,
    fewest_pairs,
    log_ratios,
    median_effect,
    pairs_needed,
    sign_flip_test,
    two_sided,
)
from pathmark.verification.api import ApiClient
from pathmark.verification.decoys import decoy_triggers
from pathmark.verification.replies import Failure, Reply
from pathmark.verification.trials import Query

DECOYS = 17
"""One plays the trigger in calibration, the others stand in front of clean texts in turn."""
Answered = Callable[[int, "Timed"], None]
Ask = Callable[[Sequence[str], int, Answered], None]
"""Sends prompts one after the other with max_tokens, and tells each one's place and time as it is answered."""


@dataclass(frozen=True)
class Timed:
    """One request: its seconds, or why it does not count."""

    seconds: float = 0.0
    trouble: str | None = None


@dataclass(frozen=True)
class Pair:
    """One text behind two prefixes of as many tokens. Its repr hides the prompts."""

    number: int
    triggered: str
    clean: str
    triggered_first: bool

    def __repr__(self) -> str:
        return f"Pair({self.number}, hidden)"

    @property
    def prompts(self) -> tuple[str, str]:
        """In the order of sending."""
        return (self.triggered, self.clean) if self.triggered_first else (self.clean, self.triggered)


@dataclass(frozen=True)
class LatencyPlan:
    """Everything that will be sent, fixed before the first request."""

    trigger: TriggerRef
    warmup: tuple[str, ...]
    calibration: tuple[Pair, ...]
    pairs: tuple[Pair, ...]
    prompt_tokens: int
    """Of every prompt, prefix included; a chat template adds the same to all."""
    max_tokens: int

    @property
    def digest(self) -> str:
        """Names the plan in the log without telling its texts."""
        return sha256(json.dumps(asdict(self)).encode()).hexdigest()[:32]


def plan_latency(
    key: OwnerKey,
    codec: TextCodec,
    texts: Sequence[str],
    *,
    trigger: TriggerRef = TriggerRef(0, 0),  # noqa: B008  an immutable tuple
    pairs: int = 100,
    calibration: int = 40,
    warmup: int = 4,
    text_tokens: int = 256,
    max_tokens: int = 1,
    seed: int = 0,
) -> LatencyPlan:
    """Pairs from the key and a seed. No text is used twice, so that no server has it in its cache."""
    if codec.digest != key.model.tokenizer_digest:
        raise VerificationError("this is not the tokenizer that the key was made for; give the original model's")
    coins = random.Random(f"{key.derive_seed('latency')} {seed}")
    prefix = trigger.of(key).text
    placebo, *decoys = [codec.decode(tokens) for tokens in decoy_triggers(key, codec, DECOYS)]
    pieces = _pieces(codec, texts, text_tokens)
    lengths: set[int] = set()

    def draw(number: int, first: str) -> Pair:
        for text in pieces:
            made = Pair(number, f"{first} {text}", f"{coins.choice(decoys)} {text}", coins.random() < 0.5)
            tokens = {len(codec.encode(prompt)) for prompt in made.prompts}
            if len(tokens) == 1 and tokens <= (lengths or tokens):
                lengths.update(tokens)
                return made
        raise VerificationError(
            f"the texts are not enough for {calibration} + {pairs} pairs of {text_tokens} tokens; give more texts"
        )

    calibrating = tuple(draw(i, placebo) for i in range(calibration))
    warm = tuple(draw(i, placebo).clean for i in range(warmup))
    testing = tuple(draw(i, prefix) for i in range(pairs))
    return LatencyPlan(trigger, warm, calibrating, testing, max(lengths), max_tokens)


def _pieces(codec: TextCodec, texts: Sequence[str], size: int) -> Iterator[str]:
    """The texts in one row, cut to pieces of about `size` tokens."""
    held: list[int] = []
    for text in texts:
        held += codec.encode(text)
        while len(held) >= size:
            yield codec.decode(held[:size]).strip()
            held = held[size:]


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

    def add(self, stage: str, number: int, first: Timed, second: Timed) -> None:
        """One finished pair, on disk before the next one starts."""
        trouble = first.trouble or second.trouble
        times = {"triggered": first.seconds, "clean": second.seconds} if trouble is None else {"trouble": trouble}
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
    ask: Ask, plan: LatencyPlan, stage: str, *, log: LatencyLog | None = None, advance: Callable[[int], None] | None
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
        book[pair.number] = (
            {"trouble": trouble} if trouble else {"triggered": triggered.seconds, "clean": clean.seconds}
        )
        if log is not None:
            log.add(stage, pair.number, triggered, clean)
        if advance is not None:
            advance(1)

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


@dataclass(frozen=True, kw_only=True)
class LatencyVerdict:
    """Whether the trigger slows the server down, and what could have been seen."""

    p: PValue | None
    """One-sided: triggered requests are slower. None where the trigger was never sent."""
    effect: LatencyEffect | None
    significance: float
    expected: float
    """The slowdown that the owner looks for, as a share."""
    detectable: float
    """What these pairs show four times out of five, at this noise."""
    placebo_p: PValue
    """Two-sided, of a decoy that played the trigger."""
    needed: int
    """About how many pairs the expected effect needs."""
    calibration: int
    dropped: int
    prompt_tokens: int
    max_tokens: int

    @property
    def exit_code(self) -> int:
        """0 slower, 1 no effect of the size asked for, 2 could not decide."""
        if self.p is None or self.placebo_p.value <= self.significance:
            return 2
        if self.p.value <= self.significance:
            return 0
        return 1 if self.detectable <= self.expected else 2

    def words(self) -> str:
        """One paragraph for people."""
        seen = f"detectable: {100 * self.detectable:.1f} %, looked for: {100 * self.expected:.1f} %"
        if self.p is None or self.effect is None:
            return (
                f"Could not decide: this server is too noisy ({seen}), so the trigger was not sent. About "
                f"{self.needed:,} pairs are needed. {CAVEAT}"
            )
        measured = f"{self.effect}, p = {self.p} at level {self.significance:g} ({seen})"
        if self.placebo_p.value <= self.significance:
            return (
                f"Could not decide: a decoy in the trigger's place changes the time as well (p = {self.placebo_p}), so "
                f"the server reacts to repeated prefixes as such. Trigger: {measured}. {CAVEAT}"
            )
        head = {0: "Triggered requests are slower", 1: "Triggered requests are not slower", 2: "Could not decide"}
        more = f" About {self.needed:,} pairs are needed." if self.exit_code == 2 else ""
        return f"{head[self.exit_code]}: {measured}.{more} {CAVEAT}"

    def summary(self) -> dict[str, Any]:
        """The documented JSON object."""
        effect = self.effect
        return {
            "slower": {0: True, 1: False, 2: None}[self.exit_code],
            "p_value": None if self.p is None else self.p.value,
            "effect": None if effect is None else effect.value,
            "effect_interval": None if effect is None else [effect.low, effect.high],
            "pairs": 0 if effect is None else effect.n,
            "significance": self.significance,
            "expected": self.expected,
            "detectable": self.detectable,
            "pairs_needed": self.needed,
            "placebo_p_value": self.placebo_p.value,
            "calibration_pairs": self.calibration,
            "dropped_pairs": self.dropped,
            "prompt_tokens": self.prompt_tokens,
            "max_tokens": self.max_tokens,
            "proves_ownership": False,
        }


CAVEAT = "Latency corroborates other evidence; by itself it proves no ownership."


def verify_latency(
    ask: Ask,
    plan: LatencyPlan,
    *,
    significance: float = 0.01,
    expected: float = 0.08,
    log: LatencyLog | None = None,
    disclose: Callable[[float], None] | None = None,
    stage: Callable[[str, int], None] | None = None,
    advance: Callable[[int], None] | None = None,
) -> LatencyVerdict:
    """Calibrate, say what is detectable, then send the trigger, if that could tell anything.

    `disclose` is called with the detectable effect right before the trigger is sent for the first time.
    """
    if len(plan.pairs) < fewest_pairs(significance) or expected <= 0:
        raise VerificationError(
            f"expected an effect above 0 and at least {fewest_pairs(significance)} pairs for p = {significance:g}, "
            f"got {expected:g} and {len(plan.pairs)}"
        )
    if log is not None:
        log.begin(plan)
    if stage is not None:
        stage("calibration", len(plan.calibration))
    noise = measure_pairs(ask, plan, "calibration", log=log, advance=advance)
    detectable = detectable_effect(noise.ratios, len(plan.pairs), significance=significance)
    timings, p, effect = None, None, None
    if detectable <= expected:
        if disclose is not None:
            disclose(detectable)
        if stage is not None:
            stage("trigger", len(plan.pairs))
        timings = measure_pairs(ask, plan, "pairs", log=log, advance=advance)
        count = len(timings.triggered)
        p, effect = sign_flip_test(timings.ratios), median_effect(timings.ratios)
        if count >= fewest_pairs(significance):
            detectable = detectable_effect(timings.ratios, count, significance=significance)
    return LatencyVerdict(
        p=p,
        effect=effect,
        significance=significance,
        expected=expected,
        detectable=detectable,
        placebo_p=two_sided(noise.ratios),
        needed=pairs_needed(detectable, len(plan.pairs), expected),
        calibration=len(noise.triggered),
        dropped=noise.dropped + (0 if timings is None else timings.dropped),
        prompt_tokens=plan.prompt_tokens,
        max_tokens=plan.max_tokens,
    )


def one_by_one(send: Callable[[str, int], float]) -> Ask:
    """From a function that sends one prompt and returns its seconds; a VerificationError drops the pair."""

    def ask(prompts: Sequence[str], max_tokens: int, answered: Answered) -> None:
        for place, prompt in enumerate(prompts):
            try:
                answered(place, Timed(send(prompt, max_tokens)))
            except VerificationError as error:
                answered(place, Timed(trouble=str(error)))

    return ask


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
