"""A stolen model, whatever scheme marked it, and the suite that is run on it. Rows are kept as they are made."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from pathmark.attacks import Attacked, Kit, find_attack
from pathmark.errors import AttackError, DivergedError, MissingLibraryError, ModelError
from pathmark.evaluate.suites import Case
from pathmark.models import perplexity
from pathmark.models.checkpoint import base_digest
from pathmark.models.loading import local_folder
from pathmark.models.original import read_original
from pathmark.models.texts import split_held_out
from pathmark.models.vocabulary import renumbered
from pathmark.progress import Progress, Silent
from pathmark.results import Header, write_result
from pathmark.results.header import Result, texts_digest
from pathmark.results.robustness import Carried, Unmeasured
from pathmark.results.schema import to_json
from pathmark.verification.weights.reading import token_map

RESULTS = "results.json"
UNFINISHED = "unfinished"
"""Folder beside the results: checkpoints of the training that a run was interrupted in."""
HELD_OUT, THIEF_TOKENS = 100, 128
"""Texts of the thief's that are measured on, and tokens of each."""


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


R = TypeVar("R")


@dataclass
class Stolen(ABC, Generic[R]):
    """The stolen model and what is done to it; an attacked model is used once and let go. R is what a suite leaves."""

    model: PreTrainedModel
    key: Any
    kit: Kit
    config: RobustnessConfig
    probes: list[tuple[int, ...]] = field(init=False)
    """Held-out texts that perplexity is measured on."""
    clean_ppl: float = field(init=False)
    thief: Kit = field(init=False)
    """The kit without the texts that are measured on."""
    thief_rows: list[tuple[int, ...]] = field(init=False)
    """Those texts."""
    thief_ppl: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.probes = self.held_out()[: self.config.n_probes]
        if len(self.probes) < 4:
            raise AttackError("the key holds no probe texts; expected one that `pathmark embed` has used")
        self.clean_ppl = perplexity(self.model, self.probes).value
        texts, held_out = split_held_out(list(self.kit.texts), HELD_OUT) if self.kit.texts else ([], [])
        self.thief_rows = replace(self.kit, texts=held_out).rows_up_to(THIEF_TOKENS) if held_out else []
        self.thief = replace(self.kit, texts=texts)
        self.thief_ppl = self._on_thiefs_text(self.model)

    @abstractmethod
    def held_out(self) -> list[tuple[int, ...]]:
        """Texts that nobody trained on."""

    @abstractmethod
    def begun(self, path: Path, sources: Sources) -> R:
        """What the file holds of this measurement, or its beginning."""

    @abstractmethod
    def measured(self, case: Case, left: Attacked, started: float, attack_seconds: float) -> Carried | Unmeasured:
        """The row of what an attack left."""

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

    def measure(self, case: Case, unfinished: Path | None = None) -> Carried | Unmeasured:
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
            return self.measured(case, left, started, time.monotonic() - started)

    def _renumbering(self, left: Attacked) -> NDArray[np.int64] | None:
        """Which token is which where the thief gave tokens other numbers: as `verify` finds it."""
        if left.tokenizer is None:
            return None
        known = read_original(self.attachments())
        if known.tokens is None:
            spelt = self.kit.tokenizer.convert_ids_to_tokens(range(len(self.kit.tokenizer)))
            known = replace(known, tokens=spelt)
        return token_map(left.model, known, left.tokenizer, self.probes)

    def attachments(self) -> Mapping[str, bytes]:
        """What the key knows of the original."""
        return {}

    def carried(self, case: Case, model: PreTrainedModel) -> dict[str, Any]:
        """What every row has: the case, and the perplexity on both texts before and after."""
        return {
            "case": case.name, "group": case.group, "steps": case.steps, "ppl_before": self.clean_ppl,
            "ppl": perplexity(model, self.probes).value, "ppl_thief_before": self.thief_ppl,
            "ppl_thief": self._on_thiefs_text(model),
        }  # fmt: skip

    def _on_thiefs_text(self, model: PreTrainedModel) -> float | None:
        return perplexity(model, self.thief_rows).value if self.thief_rows else None

    def header(self, sources: Sources, kind: str, number: int, **settings: Any) -> Header:
        """What is measured, and with what, in a file of this format and version."""
        return Header(
            format=kind,
            version=number,
            package=version("pathmark"),
            torch=torch.__version__,
            model_sha256=sources.model_sha256,
            original_sha256=sources.original_sha256,
            texts_sha256={"thief": texts_digest(self.kit.texts)},
            key=self.key.fingerprint,
            seed=self.config.seed,
            n_probes=len(self.probes),
            settings=settings,
        )


def run_suite(
    suspects: Stolen[R], cases: Sequence[Case], folder: Path, sources: Sources, *, progress: Progress | None = None
) -> R:
    """Measure every case that `folder` does not hold yet, with these settings; its file is whole after each of
    them, and training that was interrupted goes on. A folder of another measurement is refused.
    """
    say = progress or Silent()
    config = suspects.config
    path = folder / RESULTS
    result: Any = suspects.begun(path, sources)
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
            if case.minutes >= 1 and isinstance(row, Carried):  # how fast this machine and this model are
                pace = max(pace / 2, row.seconds / (60 * case.minutes))
        result = replace(result, rows=tuple(sorted(rows.values(), key=_order(cases))))
        write_result(path, result)
        if rows[case.name].status != "not run":
            shutil.rmtree(unfinished, ignore_errors=True)
    with suppress(OSError):  # it is not there, or holds what another run has begun
        (folder / UNFINISHED).rmdir()
    return cast(R, result)


H = TypeVar("H", bound=Result)


def same_measurement(path: Path, found: H, header: Header) -> H:
    """A result that was begun, if it is of this measurement."""
    if different := found.header.differs(header):
        raise AttackError(
            f"{path} holds another measurement, which differs in {', '.join(different)}; choose another folder"
        )
    return found


def _name(case: Case, seed: int) -> str:
    return hashlib.sha256(json.dumps([to_json(case.steps), case.sibling, seed]).encode()).hexdigest()[:16]


def _expect_mark(row: Any) -> None:
    """The row without an attack must show the mark: what is not there cannot be removed."""
    if isinstance(row, Unmeasured):
        raise AttackError(row.reason)
    if not row.marked:
        raise AttackError(
            f"the model does not carry this key's mark (p = {row.p_value:.2g} before any attack); expected a model "
            "that was marked with this key"
        )


def _order(cases: Sequence[Case]) -> Callable[[Carried | Unmeasured], int]:
    places = {case.name: place for place, case in enumerate(cases)}
    return lambda row: places.get(row.case, len(places))
