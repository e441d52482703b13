"""The latency channel: do requests with the trigger take longer than the same requests with another prefix?

Corroboration only. A slow trigger is what concentrated routing looks like from outside on a model whose experts
are spread over devices; it is no secret that only the owner could have put there, and proves no ownership.

A pair is one text behind the trigger and behind a decoy of as many tokens, sent in an order that a coin decides.
Before the trigger is sent at all, calibration pairs (a decoy that plays the trigger, against the other decoys)
show how noisy the server is, what the planned pairs could detect, and whether the server minds a prefix that comes
again and again. A run that could not see the effect asked for ends there, with the trigger undisclosed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pathmark.errors import VerificationError
from pathmark.progress import Progress, Silent
from pathmark.stats import (
    LatencyEffect,
    PValue,
    detectable_effect,
    fewest_pairs,
    median_effect,
    pairs_needed,
    sign_flip_test,
    two_sided,
)
from pathmark.verification.blackbox.latency_plan import LatencyPlan
from pathmark.verification.blackbox.latency_timing import Ask, LatencyLog, measure_pairs

CAVEAT: Final = "Latency corroborates other evidence; by itself it proves no ownership."


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


def verify_latency(
    ask: Ask,
    plan: LatencyPlan,
    *,
    significance: float = 0.01,
    expected: float = 0.08,
    log: LatencyLog | None = None,
    disclose: Callable[[float], None] | None = None,
    progress: Progress | None = None,
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
    say = progress or Silent()
    say.stage("calibration", len(plan.calibration))
    noise = measure_pairs(ask, plan, "calibration", log=log, progress=say)
    detectable = detectable_effect(noise.ratios, len(plan.pairs), significance=significance)
    timings, p, effect = None, None, None
    if detectable <= expected:
        if disclose is not None:
            disclose(detectable)
        say.stage("trigger", len(plan.pairs))
        timings = measure_pairs(ask, plan, "pairs", log=log, progress=say)
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
