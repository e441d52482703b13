"""What attacks leave of our own mark, by every measure; and thieves who search for the trigger or forge claims."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from pathmark.attacks import Attacked
from pathmark.attacks.search import TriggerSearch
from pathmark.errors import PathmarkError
from pathmark.evaluate.adversaries import ForgersBudget, forge_claims, look_for_trigger
from pathmark.evaluate.dispute import Party, settle_dispute
from pathmark.evaluate.stolen import RESULTS, Sources, Stolen, same_measurement
from pathmark.evaluate.suites import Case
from pathmark.keys import ModelFacts, OwnerKey, TextCodec, commit_key, open_claim, reveal_watermark
from pathmark.progress import Progress, Silent
from pathmark.results import RobustnessResult, read_robustness, write_result
from pathmark.results.robustness import (
    FORMAT,
    VERSION,
    Dispute,
    Measured,
    Reading,
    Replies,
    Row,
)
from pathmark.verification import Evidence, PathVerdict, judge, record_evidence, verify_model
from pathmark.verification.blackbox.asking import AskConfig, verify_api
from pathmark.verification.blackbox.local import LocalBackend
from pathmark.verification.paths.alignment import profile_texts
from pathmark.verification.weights.recording import record_grafted

BLACK_BOX_MAX_TOKENS = 16
SEARCHES = (TriggerSearch(), TriggerSearch(steps=80, restarts=8))
"""Budgets of a thief who looks for the trigger: as it comes, and with twice the steps and restarts."""


class Suspects(Stolen[RobustnessResult]):
    """A model that our own scheme has marked."""

    key: OwnerKey

    def held_out(self) -> list[tuple[int, ...]]:
        """The texts in the key."""
        return profile_texts(self.key)

    def attachments(self) -> Mapping[str, bytes]:
        """What the key knows of the original."""
        return self.key.attachments

    def begun(self, path: Path, sources: Sources) -> RobustnessResult:
        """What the file holds of this measurement, or its beginning."""
        header = self.header(sources, FORMAT, VERSION, trials=self.config.trials)
        if path.exists():
            return same_measurement(path, read_robustness(path), header)
        return RobustnessResult(
            header=header,
            corpus=sources.corpus,
            n_texts=len(self.kit.texts),
            layers=tuple(self.key.watermarks[0].layers),
        )

    def measured(self, case: Case, left: Attacked, started: float, attack_seconds: float) -> Row:
        """The mark by every measure."""
        model = left.model
        try:
            carried = self.carried(case, model)
            evidence = record_evidence(model, self.key, self.probes)
        except PathmarkError as broken:  # an attack may leave a model that says nothing any more
            return case.without_figures("destroyed", str(broken))
        fed = self._fed(model)
        verdict, as_it_is = judge(self.key, evidence, fed), judge(self.key, evidence)
        return Measured(
            **carried,
            **vars(_reading(as_it_is)),
            p_floor=as_it_is.p_floor.value,
            grafted=None if fed is None else _reading(judge(self.key, fed)),
            marked=verdict.marked,
            id=verdict.id,
            id_right=verdict.id == self.key.watermarks[0].id,
            n_probes=verdict.n_probes,
            n_tokens=verdict.n_tokens,
            black_box=self._ask(model),
            thief_wsr=None if left.key is None else verify_model(model, left.key, self.probes).wsr,
            dispute=None if left.key is None else self._settle(model, left.key),
            attack_seconds=attack_seconds,
            seconds=time.monotonic() - started,
        )

    def _fed(self, model: PreTrainedModel) -> Evidence | None:
        """The attacked model's marked layers behind the original's lower ones; None where that cannot be done."""
        if self.kit.original is None:
            return None
        try:
            return record_grafted(model, self.kit.original, self.key, self.probes)
        except PathmarkError:  # of another build, with layers dropped for instance
            return None

    def _settle(self, model: PreTrainedModel, thief: OwnerKey) -> Dispute:
        """The dispute over two marks in one model. The thief's key was seen years ago, which must not help."""
        first, later = (open_claim(reveal_watermark(key, 0), commit_key(key)) for key in (self.key, thief))
        owner = Party(first, datetime.date(2025, 1, 1), self.model, datetime.date(2025, 2, 1))
        second = Party(later, datetime.date(2020, 1, 1), model, datetime.date(2026, 1, 1))
        found = settle_dispute((owner, second), self.probes)
        return Dispute(
            prior=found.prior,
            contains=found.contains,
            log10_p=tuple(None if p is None else p.log10 for p in found.p),
            reason=found.reason,
        )

    def _ask(self, model: PreTrainedModel) -> Replies | None:
        if not self.config.trials:
            return None
        backend = LocalBackend(model, self.kit.tokenizer, batch_size=32)
        verdict = verify_api(backend, self.key, AskConfig(trials=self.config.trials, max_tokens=BLACK_BOX_MAX_TOKENS))
        rate = verdict.match_rate
        return Replies(hits=rate.hits, n=rate.n, p_value=None if verdict.p is None else verdict.p.value)


def _reading(verdict: PathVerdict) -> Reading:
    return Reading(
        wsr=verdict.wsr,
        accuracy=verdict.scores[0].accuracy.value,
        p_value=verdict.p.value,
        log10_p=verdict.p.log10,
        erased_layers=tuple(verdict.erased_layers),
        alignment=None if verdict.alignment is None else verdict.alignment.confidence,
    )


def run_adversaries(
    suspects: Suspects,
    folder: Path,
    facts: ModelFacts,
    codec: TextCodec,
    *,
    skip: Sequence[str] = (),
    searches: Sequence[TriggerSearch] = SEARCHES,
    progress: Progress | None = None,
) -> RobustnessResult:
    """Add to a suite's results what searches for the trigger find and what forged claims come to."""
    say = progress or Silent()
    path = folder / RESULTS
    result = read_robustness(path)
    for search in () if "search" in skip else searches[len(result.searches) :]:
        say.stage(f"search for the trigger, {search.restarts} x {search.steps} gradients", None)
        found = look_for_trigger(suspects.model, suspects.key, suspects.kit, suspects.probes, search)
        result = replace(result, searches=(*result.searches, found))
        write_result(path, result)
    if result.forgery is None and "forgery" not in skip:
        budget = ForgersBudget(seed=suspects.config.seed)
        forged = forge_claims(suspects.model, suspects.key, facts, codec, suspects.probes, budget, say)
        result = replace(result, forgery=tuple(forged))
        write_result(path, result)
    return result
