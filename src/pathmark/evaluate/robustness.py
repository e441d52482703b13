"""What a suite of attacks leaves of a mark, and what each costs the thief. Rows are kept as they are made."""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from pathmark.attacks import Attacked, Kit, find_attack
from pathmark.attacks.search import TriggerSearch
from pathmark.errors import AttackError, DivergedError, MissingLibraryError, ModelError, PathmarkError
from pathmark.evaluate.adversaries import ForgersBudget, forge_claims, look_for_trigger
from pathmark.evaluate.dispute import Party, settle_dispute
from pathmark.evaluate.suites import Case
from pathmark.keys import ModelFacts, OwnerKey, TextCodec, commit_key, open_claim, reveal_watermark
from pathmark.models import perplexity
from pathmark.models.checkpoint import base_digest
from pathmark.models.loading import local_folder
from pathmark.models.original import read_original
from pathmark.models.texts import split_held_out
from pathmark.models.vocabulary import renumbered
from pathmark.progress import Progress, Silent
from pathmark.results import Header, RobustnessResult, read_robustness, write_result
from pathmark.results.header import texts_digest
from pathmark.results.robustness import FORMAT, VERSION, Dispute, Measured, Reading, Replies, Row
from pathmark.results.schema import to_json
from pathmark.verification import Evidence, PathVerdict, judge, record_evidence, verify_model
from pathmark.verification.blackbox.asking import AskConfig, verify_api
from pathmark.verification.blackbox.local import LocalBackend
from pathmark.verification.paths.alignment import profile_texts
from pathmark.verification.weights.reading import token_map
from pathmark.verification.weights.recording import record_grafted

RESULTS = "results.json"
UNFINISHED = "unfinished"
"""Folder beside the results: checkpoints of the training that a run was interrupted in."""
BLACK_BOX_MAX_TOKENS = 16
HELD_OUT, THIEF_TOKENS = 100, 128
"""Texts of the thief's that are measured on, and tokens of each."""
SEARCHES = (TriggerSearch(), TriggerSearch(steps=80, restarts=8))
"""Budgets of a thief who looks for the trigger: as it comes, and with twice the steps and restarts."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where models and texts came from, as the result file names them."""

    model_sha256: str
    original_sha256: str | None = None
    corpus: str = "bundled"

    @classmethod
    def of(cls, model: str, original: str | None = None, corpus: Path | None = None) -> Sources:
        """Of model folders and a file of texts."""
        digests = [None if name is None else base_digest(local_folder(name)) for name in (model, original)]
        assert digests[0] is not None
        return cls(
            model_sha256=digests[0],
            original_sha256=digests[1],
            corpus="bundled" if corpus is None else corpus.name,
        )


@dataclass(frozen=True, kw_only=True)
class RobustnessConfig:
    """How to measure; what to carry out is the suite."""

    n_probes: int = 100
    trials: int = 0
    """Black-box trials after each attack, where the model was taught its marks."""
    seed: int = 0
    """Of every attack that draws something."""
    hours: float | None = None
    """Stop before an attack that would exceed this; its rows say so."""

    def __post_init__(self) -> None:
        if self.n_probes < 4 or self.trials < 0 or (self.hours is not None and self.hours <= 0):
            raise ValueError(f"expected at least 4 probes, no negative trials and a positive budget, got {self}")


@dataclass
class Suspects:
    """The stolen model and what is done to it; an attacked model is used once and let go."""

    model: PreTrainedModel
    key: OwnerKey
    kit: Kit
    config: RobustnessConfig
    probes: list[tuple[int, ...]] = field(init=False)
    clean_ppl: float = field(init=False)
    thief: Kit = field(init=False)
    """The kit without the texts that are measured on."""
    thief_rows: list[tuple[int, ...]] = field(init=False)
    """Those texts."""
    thief_ppl: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.probes = profile_texts(self.key)[: self.config.n_probes]
        if len(self.probes) < 4:
            raise AttackError("the key holds no probe texts; expected one that `pathmark embed` has used")
        self.clean_ppl = perplexity(self.model, self.probes).value
        texts, held_out = split_held_out(list(self.kit.texts), HELD_OUT) if self.kit.texts else ([], [])
        self.thief_rows = replace(self.kit, texts=held_out).rows_up_to(THIEF_TOKENS) if held_out else []
        self.thief = replace(self.kit, texts=texts)
        self.thief_ppl = self._on_thiefs_text(self.model)

    def attacked(self, case: Case, unfinished: Path | None = None) -> Attacked:
        """What the case's attacks leave, one after the other; with the thief's key where one embedded it."""
        left = Attacked(self.model)
        kit = replace(self.thief.beside_sibling() if case.sibling else self.thief, unfinished=unfinished)
        for step in case.steps:
            attack = find_attack(step.attack)
            given = dict(step.settings)
            if any(option.name == "seed" for option in attack.options()):
                given.setdefault("seed", self.config.seed)
            after = attack.run(left.model, attack.configure(**given), kit)
            left = Attacked(after.model, after.key or left.key, after.tokenizer or left.tokenizer)
        return left

    def measure(self, case: Case, unfinished: Path | None = None) -> Row:
        """One row: the mark by every measure, and what the attack cost in perplexity.

        `unfinished` is a folder of this case's own, where training goes on that was interrupted.
        """
        started = time.monotonic()
        try:
            left = self.attacked(case, unfinished)
        except DivergedError as broken:
            return case.without_figures("destroyed", str(broken))
        except (AttackError, ModelError, MissingLibraryError) as refused:
            return case.without_figures("refused", str(refused))
        with renumbered(left.model.eval(), self._renumbering(left)):
            return self._measured(case, left, started, time.monotonic() - started)

    def _renumbering(self, left: Attacked) -> NDArray[np.int64] | None:
        """Which token is which where the thief gave tokens other numbers: as `verify` finds it."""
        if left.tokenizer is None:
            return None
        known = read_original(self.key.attachments)
        if known.tokens is None:
            spelt = self.kit.tokenizer.convert_ids_to_tokens(range(len(self.kit.tokenizer)))
            known = replace(known, tokens=spelt)
        return token_map(left.model, known, left.tokenizer, self.probes)

    def _measured(self, case: Case, left: Attacked, started: float, attack_seconds: float) -> Row:
        """The row of what an attack left."""
        model = left.model
        try:
            ppl, ppl_thief = perplexity(model, self.probes).value, self._on_thiefs_text(model)
            evidence = record_evidence(model, self.key, self.probes)
        except PathmarkError as broken:  # an attack may leave a model that says nothing any more
            return case.without_figures("destroyed", str(broken))
        fed = self._fed(model)
        verdict, as_it_is = judge(self.key, evidence, fed), judge(self.key, evidence)
        return Measured(
            case=case.name,
            group=case.group,
            steps=case.steps,
            ppl_before=self.clean_ppl,
            ppl=ppl,
            ppl_thief_before=self.thief_ppl,
            ppl_thief=ppl_thief,
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

    def _on_thiefs_text(self, model: PreTrainedModel) -> float | None:
        return perplexity(model, self.thief_rows).value if self.thief_rows else None

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

    def header(self, sources: Sources) -> Header:
        """What is measured, and with what."""
        return Header(
            format=FORMAT,
            version=VERSION,
            package=version("pathmark"),
            torch=torch.__version__,
            model_sha256=sources.model_sha256,
            original_sha256=sources.original_sha256,
            texts_sha256={"thief": texts_digest(self.kit.texts)},
            key=self.key.fingerprint,
            seed=self.config.seed,
            n_probes=len(self.probes),
            settings={"trials": self.config.trials},
        )


def _reading(verdict: PathVerdict) -> Reading:
    return Reading(
        wsr=verdict.wsr,
        accuracy=verdict.scores[0].accuracy.value,
        p_value=verdict.p.value,
        log10_p=verdict.p.log10,
        erased_layers=tuple(verdict.erased_layers),
        alignment=None if verdict.alignment is None else verdict.alignment.confidence,
    )


def run_suite(
    suspects: Suspects, cases: Sequence[Case], folder: Path, sources: Sources, *, progress: Progress | None = None
) -> RobustnessResult:
    """Measure every case that `folder` does not hold yet, with these settings; its file is whole after each of
    them, and training that was interrupted goes on. A folder of another measurement is refused.
    """
    say = progress or Silent()
    config = suspects.config
    path = folder / RESULTS
    result = _begun(path, suspects, sources)
    rows = {row.case: row for row in result.rows if row.status not in ("not run", "refused")}
    deadline = None if config.hours is None else time.monotonic() + 3600 * config.hours
    pace = 1.0
    for number, planned in enumerate(cases, start=1):
        case = planned.at_best_rate(rows.values())
        if case.name in rows and rows[case.name].steps == case.steps:
            continue
        say.stage(f"{number}/{len(cases)} {case.name}", None)
        unfinished = folder / UNFINISHED / _name(case, config.seed)
        if deadline is not None and time.monotonic() + 60 * case.minutes * pace > deadline:
            reason = f"it would exceed the budget of {config.hours:g} hours"
            rows[case.name] = case.without_figures("not run", reason)
        else:
            row = suspects.measure(case, unfinished)
            if not case.steps:
                _expect_mark(row)
            rows[case.name] = row
            if case.minutes >= 1 and isinstance(row, Measured):  # how fast this machine and this model are
                pace = max(pace / 2, row.seconds / (60 * case.minutes))
        result = replace(result, rows=tuple(sorted(rows.values(), key=_order(cases))))
        write_result(path, result)
        if rows[case.name].status != "not run":
            shutil.rmtree(unfinished, ignore_errors=True)
    with suppress(OSError):  # it is not there, or holds what another run has begun
        (folder / UNFINISHED).rmdir()
    return result


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


def _begun(path: Path, suspects: Suspects, sources: Sources) -> RobustnessResult:
    """What the folder holds of this measurement, or its beginning."""
    header = suspects.header(sources)
    if not path.exists():
        return RobustnessResult(
            header=header,
            corpus=sources.corpus,
            n_texts=len(suspects.kit.texts),
            layers=tuple(suspects.key.watermarks[0].layers),
        )
    found = read_robustness(path)
    if different := found.header.differs(header):
        raise AttackError(
            f"{path} holds another measurement, which differs in {', '.join(different)}; choose another folder"
        )
    return found


def _name(case: Case, seed: int) -> str:
    return hashlib.sha256(json.dumps([to_json(case.steps), case.sibling, seed]).encode()).hexdigest()[:16]


def _expect_mark(row: Row) -> None:
    """The row without an attack must show the mark: what is not there cannot be removed."""
    if not isinstance(row, Measured):
        raise AttackError(row.reason)
    if not row.marked:
        raise AttackError(
            f"the model does not carry this key's mark (p = {row.p_value:.2g} before any attack); expected a model "
            "that was marked with this key"
        )


def _order(cases: Sequence[Case]) -> Callable[[Row], int]:
    places = {case.name: place for place, case in enumerate(cases)}
    return lambda row: places.get(row.case, len(places))
