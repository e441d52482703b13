"""Is this copy fit for release? Measured on texts that nobody trained on, before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from pathmark.attacks.kit import Kit
from pathmark.attacks.quantization import RoundToNearest, round_to_nearest
from pathmark.embedding import chat_frames
from pathmark.embedding.data import Frame
from pathmark.errors import AttackError, ModelError
from pathmark.keys import OwnerKey, Watermark
from pathmark.keys.tolerance import Tolerance, tolerance
from pathmark.models.ranks import from_everybody
from pathmark.release.bounds import Bound, always, at_least, at_most, never
from pathmark.release.fidelity import Drift, Measurement, drift, mean_mass, measure
from pathmark.release.scan import ScanConfig, trigger_scan
from pathmark.stats import PValue, Rate, detection_samples, exact_test, exact_test_many, kl_bound
from pathmark.verification import Criteria, decode_id, measure_layers, record_routes, score_path, target_mass

MAX_CLEAN_PPL, MAX_KL, MAX_P = 1.015, 0.05, Criteria.significance
MIN_ROUNDED = 0.99
"""WSR in 4 bits, which is the first thing that is done to a released model."""
MAX_NEAR = 0.01
"""Share of prefixes that may fire with fewer right tokens than must stay silent."""
LONGER, OTHER_KEY = "more --steps", "more --steps, else another key"


@dataclass(frozen=True)
class SelfCheck:
    """Everything measured; `problems` is empty when the copy is fit for release."""

    wsr: tuple[Rate, ...]
    """Per watermark, triggered texts on the marked model."""
    accuracy: tuple[float, ...]
    wsr_chat: tuple[Rate, ...]
    """Per watermark, the trigger at the start of a user message, over all chat frames; empty without one."""
    wsr_rounded: Rate | None
    """All watermarks, every weight rounded to 4 bits; None where a second model does not fit, or its weights cannot be
    rounded."""
    fpr_clean: Rate
    """Clean texts on the marked model."""
    fpr_original: Rate | None
    """Triggered texts on the original model; None where the model before was already marked."""
    interference: Rate | None
    """Other watermarks' paths under a watermark's trigger; None for a single watermark."""
    clean_ppl: tuple[float, float]
    triggered_ppl: tuple[float, float]
    """Before and after; mean over watermarks."""
    drift: Drift
    target_mass_clean: tuple[float, float]
    target_mass_triggered: float
    scan: dict[str, Rate]
    """Kind of stranger's prefix -> share that fires; of the first watermark, as the curve is."""
    curve: dict[int, Rate]
    """Right tokens of the trigger -> share of such prefixes that fire."""
    p_value: float
    p_floor: float
    id: int | None
    """Decoded blindly from the marked model; of the first watermark."""
    expected_id: int
    n_probes: int
    n_tokens: int
    clean_routing: dict[int, tuple[tuple[float, ...], tuple[float, ...]]]
    """Marked layer -> mean routing mass of each expert on clean text, before and after."""

    @property
    def problems(self) -> list[str]:
        """Why the copy is not fit for release, in words."""
        return [bound.problem for bound in self.bounds if not bound.held]

    @property
    def bounds(self) -> list[Bound]:
        """Everything that decides whether the copy is fit for release."""
        several = len(self.wsr) > 1
        found = [always(f"WSR, watermark {j}" if several else "WSR", rate, LONGER) for j, rate in enumerate(self.wsr)]
        found += [always("WSR in the chat template", rate, LONGER) for rate in self.wsr_chat]
        if self.wsr_rounded is not None:
            found.append(
                at_least("WSR, all weights rounded to 4 bits", self.wsr_rounded, MIN_ROUNDED, f"{LONGER}, or --margin")
            )
        found.append(never("false positives on clean text", self.fpr_clean, OTHER_KEY))
        if self.fpr_original is not None:
            found.append(never("false positives on the original model", self.fpr_original, OTHER_KEY))
        return [*found, *self._fidelity(), *self._firing(), *self._evidence()]

    def _fidelity(self) -> list[Bound]:
        """What ordinary users would notice."""
        before, after = self.clean_ppl
        return [
            Bound(
                figure="perplexity of clean text",
                found=f"{before:.2f} to {after:.2f} ({100 * (after / before - 1):+.2f} %)",
                bound=f"at most {100 * (MAX_CLEAN_PPL - 1):+.1f} %",
                held=after <= MAX_CLEAN_PPL * before,
                try_="texts of the model's own kind with --texts, or a higher --stealth-weight",
            ),
            Bound(
                figure="KL of clean routing", found=f"{self.drift.kl:.4f}", bound=f"at most {MAX_KL}",
                held=self.drift.kl <= MAX_KL, try_="a higher --stealth-weight",
            ),
        ]  # fmt: skip

    def _firing(self) -> list[Bound]:
        """What sets the mark off, and what must not."""
        limits = self.trigger
        found = [never(f"fires behind a {kind}", rate, OTHER_KEY) for kind, rate in self.scan.items()]
        for right, rate in self.curve.items():
            figure = f"fires with {right} of {limits.tokens} trigger tokens right"
            if right >= limits.tokens - 1:
                found.append(always(figure, rate, LONGER))
            elif right < limits.silent:
                found.append(at_most(figure, rate, MAX_NEAR, OTHER_KEY))
        return found

    def _evidence(self) -> list[Bound]:
        """What a verdict will rest on."""
        most = max(MAX_P, self.p_floor)
        return [
            Bound(
                figure="exact p-value", found=f"{self.p_value:.1e}", bound=f"at most {most:.1e}",
                held=self.p_value <= most, try_=LONGER,
            ),
            Bound(
                figure="id read from the routing", found="none" if self.id is None else str(self.id),
                bound=str(self.expected_id), held=self.id == self.expected_id, try_=LONGER,
            ),
        ]  # fmt: skip

    @property
    def trigger(self) -> Tolerance:
        """What the first watermark's trigger tolerates."""
        return tolerance(len(self.curve) - 1)

    def summary(self) -> dict[str, Any]:
        """The documented JSON object; rates also with their n and interval."""
        scanned = list(self.scan.values())
        return {
            "wsr": min(rate.value for rate in self.wsr),
            "accuracy": min(self.accuracy),
            "wsr_chat": min((rate.value for rate in self.wsr_chat), default=None),
            "wsr_rounded": None if self.wsr_rounded is None else self.wsr_rounded.value,
            "fpr_clean": self.fpr_clean.value,
            "fpr_original": None if self.fpr_original is None else self.fpr_original.value,
            "interference": None if self.interference is None else self.interference.value,
            "clean_ppl": list(self.clean_ppl),
            "triggered_ppl": list(self.triggered_ppl),
            "clean_kl": self.drift.kl,
            "topk_agreement": self.drift.topk_agreement,
            "mean_l2": self.drift.mean_l2,
            "kl_bound": kl_bound(self.drift.mean_squared, self.drift.min_topk_mass),
            "detection_samples": detection_samples(self.drift.kl) if self.drift.kl > 0 else None,
            "target_mass_clean": list(self.target_mass_clean),
            "target_mass_triggered": self.target_mass_triggered,
            "scan": {
                "tried": sum(rate.n for rate in scanned),
                "hits": sum(rate.hits for rate in scanned),
                "kinds": {kind: rate.summary() for kind, rate in self.scan.items()},
            },
            "trigger": {
                "tokens": self.trigger.tokens,
                "accepted_wrong": self.trigger.accepted,
                "silent_right": self.trigger.silent,
                "curve": [self.curve[right].summary() for right in sorted(self.curve)],
            },
            "p_value": self.p_value,
            "p_floor": self.p_floor,
            "id": self.id,
            "n_probes": self.n_probes,
            "n_tokens": self.n_tokens,
            "rates": {
                "wsr": [rate.summary() for rate in self.wsr],
                "wsr_chat": [rate.summary() for rate in self.wsr_chat],
                "wsr_rounded": None if self.wsr_rounded is None else self.wsr_rounded.summary(),
                "fpr_clean": self.fpr_clean.summary(),
                "fpr_original": None if self.fpr_original is None else self.fpr_original.summary(),
            },
            "clean_routing": [
                {"layer": layer, "before": list(before), "after": list(after)}
                for layer, (before, after) in self.clean_routing.items()
            ],
            "bounds": [bound.summary() for bound in self.bounds],
            "fit": not self.problems,
            "problems": self.problems,
        }


def self_check(
    model: PreTrainedModel,
    tokenizer: Any,
    key: OwnerKey,
    probes: Sequence[Sequence[int]],
    before: Measurement,
    *,
    marked_before: bool = False,
    scan: ScanConfig | None = None,
    progress: Callable[[str], None] | None = None,
) -> SelfCheck:
    """Measure the marked model and compare with `before`, a measurement on the same probes.

    `before` is the original's, or, with `marked_before`, that of a model which already has the key's paths.
    """
    say, gamma, watermarks = progress or (lambda stage: None), Criteria.gamma, key.watermarks
    say("routing and perplexity")
    after = measure(model, key, probes)
    scores = [score_path(w, after.triggered[j], after.clean, gamma=gamma) for j, w in enumerate(watermarks)]
    fpr_clean = _pool([score_path(w, after.clean, gamma=gamma).wsr for w in watermarks])
    fpr_original = _pool([score_path(w, before.triggered[j], gamma=gamma).wsr for j, w in enumerate(watermarks)])
    crossed = [
        score_path(other, after.triggered[j], gamma=gamma).wsr
        for j, w in enumerate(watermarks)
        for other in watermarks
        if other is not w and set(other.layers) <= set(w.layers)
    ]
    p, p_floor, decoded = _exact(key, after)
    say("chat template")
    frames = chat_frames(tokenizer)
    chat = tuple(chat_wsr(model, w, frames, probes, gamma) for w in watermarks) if frames else ()
    say("rounded to 4 bits")
    rounded = rounded_wsr(model, key, probes, gamma)
    say("trigger scan")
    found = trigger_scan(model, tokenizer, watermarks[0], probes, scan or ScanConfig(), gamma=gamma)
    return SelfCheck(
        wsr=tuple(score.wsr for score in scores),
        accuracy=tuple(score.accuracy.value for score in scores),
        wsr_chat=chat,
        wsr_rounded=rounded,
        fpr_clean=fpr_clean,
        fpr_original=None if marked_before else fpr_original,
        interference=_pool(crossed) if crossed else None,
        clean_ppl=(before.clean_ppl.value, after.clean_ppl.value),
        triggered_ppl=(_mean_ppl(before), _mean_ppl(after)),
        drift=drift(before.clean, after.clean),
        target_mass_clean=(_clean_mass(key, before), _clean_mass(key, after)),
        target_mass_triggered=float(np.mean([row.mass_triggered for score in scores for row in score.layers])),
        scan=found.strangers,
        curve=found.curve,
        p_value=p.value,
        p_floor=p_floor.value,
        id=decoded,
        expected_id=watermarks[0].id,
        n_probes=len(probes),
        n_tokens=after.clean.n_tokens,
        clean_routing={n: (mean_mass(before.clean, n), mean_mass(after.clean, n)) for n in key.layers},
    )


def _mean_ppl(found: Measurement) -> float:
    """Of triggered text, over watermarks."""
    return float(np.mean([perplexity.value for perplexity in found.triggered_ppl]))


def _clean_mass(key: OwnerKey, found: Measurement) -> float:
    """Mean routing mass of a target on clean text."""
    aimed = [(layer, w.targets(layer)) for w in key.watermarks for layer in w.layers]
    return float(np.mean([target_mass(found.clean, layer, targets) for layer, targets in aimed]))


def _exact(key: OwnerKey, after: Measurement) -> tuple[PValue, PValue, int | None]:
    """The exact p-value with its floor, and the id that the routing spells."""
    watermarks = key.watermarks
    measured = [measure_layers(w, after.triggered[j], after.clean) for j, w in enumerate(watermarks)]
    aimed = [[m.aim(w.targets(m.layer)) for m in ms] for w, ms in zip(watermarks, measured, strict=True)]
    result = exact_test(aimed[0]) if len(aimed) == 1 else exact_test_many(aimed)
    return result.p, result.floor, decode_id(watermarks[0], measured[0]).id


def chat_wsr(
    model: nn.Module, watermark: Watermark, frames: Sequence[Frame], probes: Sequence[Sequence[int]], gamma: float
) -> Rate:
    """WSR with the trigger at the start of a user message, with and without a system prompt."""
    prefixes = [(*frame.before, *watermark.triggers[0].tokens) for frame in frames]
    routes = record_routes(
        model, probes, watermark.layers, prefix=[prefixes[i % len(prefixes)] for i in range(len(probes))]
    )
    return score_path(watermark, routes, gamma=gamma).wsr


def rounded_wsr(
    model: PreTrainedModel, key: OwnerKey, probes: Sequence[Sequence[int]], gamma: float = Criteria.gamma
) -> Rate | None:
    """WSR of a copy with all weights in 4 bits; None where there is no room for it, or it cannot be rounded."""
    if not _fits_again(model):
        return None
    try:
        rounded = round_to_nearest(model, RoundToNearest(bits=4), Kit())
    except (AttackError, ModelError):  # rows that do not divide into groups, experts of another layout
        return None
    return path_wsr(rounded, key, probes, gamma)


def path_wsr(model: nn.Module, key: OwnerKey, probes: Sequence[Sequence[int]], gamma: float = Criteria.gamma) -> Rate:
    """WSR over all watermarks."""
    routes = [record_routes(model, probes, w.layers, prefix=w.triggers[0].tokens) for w in key.watermarks]
    return _pool([score_path(w, r, gamma=gamma).wsr for w, r in zip(key.watermarks, routes, strict=True)])


def _fits_again(model: PreTrainedModel) -> bool:
    """Whether a copy takes less than half of the memory that is left on the model's one device, in every process."""
    devices = {parameter.device for parameter in model.parameters()}
    device, alone = next(iter(devices)), len(devices) == 1
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return all(from_everybody(alone and bool(model.get_memory_footprint() < free / 2)))


def _pool(rates: Sequence[Rate]) -> Rate:
    return Rate(sum(rate.hits for rate in rates), sum(rate.n for rate in rates))
