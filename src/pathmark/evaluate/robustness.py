"""What a suite of attacks leaves of a mark, and what each costs the thief. Rows are kept as they are made."""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from pathmark.attacks import find_attack
from pathmark.attacks.kit import Kit
from pathmark.attacks.overwriting import Overwrite, overwrite_with_key
from pathmark.attacks.search import TriggerSearch
from pathmark.errors import AttackError, DivergedError, ModelError, PathmarkError
from pathmark.evaluate.adversaries import forge_claims, look_for_trigger
from pathmark.evaluate.dispute import Party, settle_dispute
from pathmark.evaluate.suites import Case
from pathmark.keys import ModelFacts, OwnerKey, TextCodec, commit_key
from pathmark.keys.safefile import write_private
from pathmark.models import perplexity
from pathmark.progress import Progress, Silent
from pathmark.verification import Evidence, PathVerdict, judge, record_evidence, verify_model
from pathmark.verification.blackbox.asking import AskConfig, verify_api
from pathmark.verification.blackbox.local import LocalBackend
from pathmark.verification.paths.alignment import profile_texts
from pathmark.verification.weights.recording import record_grafted

RESULTS = "results.json"
UNFINISHED = "unfinished"
"""Folder beside the results: checkpoints of the training that a run was interrupted in."""
FORMAT = "pathmark-robustness-v1"
BLACK_BOX_MAX_TOKENS = 16
SEARCHES = (TriggerSearch(), TriggerSearch(steps=80, restarts=8))
"""Budgets of a thief who looks for the trigger: as it comes, and with twice the steps and restarts."""


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

    def __post_init__(self) -> None:
        self.probes = profile_texts(self.key)[: self.config.n_probes]
        if len(self.probes) < 4:
            raise AttackError("the key holds no probe texts; expected one that `pathmark embed` has used")
        self.clean_ppl = perplexity(self.model, self.probes).value

    def attacked(self, case: Case, unfinished: Path | None = None) -> tuple[PreTrainedModel, OwnerKey | None]:
        """The model after the case's attacks, one after the other; with the thief's key where it embedded one."""
        model, thief = self.model, None
        kit = replace(self.kit.beside_sibling() if case.sibling else self.kit, unfinished=unfinished)
        for name, settings in case.steps:
            attack = find_attack(name)
            given = dict(settings)
            if any(option.name == "seed" for option in attack.options()):
                given.setdefault("seed", self.config.seed)
            config = attack.configure(**given)
            if isinstance(config, Overwrite):
                model, thief = overwrite_with_key(model, config, kit)
            else:
                model = attack.run(model, config, kit)
        return model, thief

    def measure(self, case: Case, unfinished: Path | None = None) -> dict[str, Any]:
        """One row: the mark by every measure, and what the attack cost in perplexity.

        `unfinished` is a folder of this case's own, where training goes on that was interrupted.
        """
        started = time.monotonic()
        row: dict[str, Any] = {
            "case": case.name,
            "group": case.group,
            "steps": case.record(),
            "seed": self.config.seed,
        }
        try:
            model, thief = self.attacked(case, unfinished)
            model = model.eval()
        except DivergedError as broken:
            return row | {"status": "destroyed", "reason": str(broken)}
        except (AttackError, ModelError) as refused:
            return row | {"status": "refused", "reason": str(refused)}
        attack_seconds = time.monotonic() - started
        row |= {"attack_seconds": attack_seconds, "ppl_before": self.clean_ppl}
        try:
            ppl = perplexity(model, self.probes).value
            evidence = record_evidence(model, self.key, self.probes)
        except PathmarkError as broken:  # an attack may leave a model that says nothing any more
            return row | {"status": "destroyed", "reason": str(broken)}
        fed = self._fed(model)
        verdict, as_it_is = judge(self.key, evidence, fed), judge(self.key, evidence)
        row |= {
            "status": "measured",
            "ppl": ppl,
            "ppl_change": ppl / self.clean_ppl - 1,
            **self._reading(as_it_is),
            "p_floor": as_it_is.p_floor.value,
            "grafted": None if fed is None else self._reading(judge(self.key, fed)),
            "marked": verdict.marked,
            "id": verdict.id,
            "id_right": verdict.id == self.key.watermarks[0].id,
            "n_probes": verdict.n_probes,
            "n_tokens": verdict.n_tokens,
            "black_box": self._ask(model),
            "thief_wsr": None if thief is None else verify_model(model, thief, self.probes).wsr.summary(),
            "dispute": None if thief is None else self._settle(model, thief),
            "seconds": time.monotonic() - started,
        }
        return row

    def _fed(self, model: PreTrainedModel) -> Evidence | None:
        """The attacked model's marked layers behind the original's lower ones; None where that cannot be done."""
        if self.kit.base is None:
            return None
        try:
            return record_grafted(model, self.kit.base, self.key, self.probes)
        except PathmarkError:  # of another build, with layers dropped for instance
            return None

    @staticmethod
    def _reading(verdict: PathVerdict) -> dict[str, Any]:
        return {
            "wsr": verdict.wsr.summary(),
            "accuracy": verdict.scores[0].accuracy.value,
            "p_value": verdict.p.value,
            "log10_p": verdict.p.log10,
            "erased_layers": list(verdict.erased_layers),
            "alignment": None if verdict.alignment is None else verdict.alignment.confidence,
        }

    def _settle(self, model: PreTrainedModel, thief: OwnerKey) -> dict[str, Any]:
        """The dispute over two marks in one model. The thief's key was seen years ago, which must not help."""
        owner = Party(self.key, commit_key(self.key), datetime.date(2025, 1, 1), self.model, datetime.date(2025, 2, 1))
        second = Party(thief, commit_key(thief), datetime.date(2020, 1, 1), model, datetime.date(2026, 1, 1))
        return settle_dispute((owner, second), self.probes).summary()

    def _ask(self, model: PreTrainedModel) -> dict[str, Any] | None:
        if not self.config.trials:
            return None
        backend = LocalBackend(model, self.kit.tokenizer, batch_size=32)
        verdict = verify_api(backend, self.key, AskConfig(trials=self.config.trials, max_tokens=BLACK_BOX_MAX_TOKENS))
        return verdict.match_rate.summary() | {"p_value": None if verdict.p is None else verdict.p.value}


def run_suite(
    suspects: Suspects,
    cases: Sequence[Case],
    folder: Path,
    *,
    facts: Mapping[str, Any],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure every case that `folder` does not hold yet, with these settings; its file is whole after each of
    them, and training that was interrupted goes on.

    `facts` say what was measured (model, suite, corpus); a folder of another measurement is refused.
    """
    say = progress or Silent()
    config = suspects.config
    identity = _identity(suspects, facts)
    path = folder / RESULTS
    results = _open_results(path, identity, facts, suspects)
    wanted = {case.name: case.record() for case in cases}
    results["rows"] = [  # what is there, but for rows that this run makes or that had other settings
        row for row in results["rows"]
        if row["status"] not in ("not run", "refused") and row["steps"] == wanted.get(row["case"], row["steps"])
    ]  # fmt: skip
    done = {(row["case"], row["seed"]) for row in results["rows"]}
    deadline = None if config.hours is None else time.monotonic() + 3600 * config.hours
    pace = 1.0
    for number, case in enumerate(cases, start=1):
        if (case.name, config.seed) in done:
            continue
        say.stage(f"{number}/{len(cases)} {case.name}", None)
        if deadline is not None and time.monotonic() + 60 * case.minutes * pace > deadline:
            row: dict[str, Any] = {"case": case.name, "group": case.group, "seed": config.seed, "status": "not run"}
            results["rows"].append(row | {"reason": f"it would exceed the budget of {config.hours:g} hours"})
        else:
            unfinished = folder / UNFINISHED / _name(case, config.seed)
            row = suspects.measure(case, unfinished)
            if not case.steps:
                _expect_mark(row)
            results["rows"].append(row)
            if case.minutes >= 1 and "seconds" in row:  # how fast this machine and this model are
                pace = max(pace / 2, row["seconds"] / (60 * case.minutes))
        results["rows"].sort(key=_order(cases))
        write_results(path, results)
        if row["status"] != "not run":
            shutil.rmtree(unfinished, ignore_errors=True)
    with suppress(OSError):  # it is not there, or holds what another run has begun
        (folder / UNFINISHED).rmdir()
    return results


def _name(case: Case, seed: int) -> str:
    return hashlib.sha256(json.dumps([case.record(), case.sibling, seed]).encode()).hexdigest()[:16]


def _expect_mark(row: Mapping[str, Any]) -> None:
    """The row without an attack must show the mark: what is not there cannot be removed."""
    if row["status"] != "measured":
        raise AttackError(row["reason"])
    if not row["marked"]:
        raise AttackError(
            f"the model does not carry this key's mark (p = {row['p_value']:.2g} before any attack); expected a model "
            "that was marked with this key"
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
) -> dict[str, Any]:
    """Add to a suite's results what searches for the trigger find and what forged claims come to."""
    say = progress or Silent()
    path = folder / RESULTS
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    done = results.setdefault("searches", [])
    for budget in () if "search" in skip else searches[len(done) :]:
        say.stage(f"search for the trigger, {budget.restarts} x {budget.steps} gradients", None)
        done.append(look_for_trigger(suspects.model, suspects.key, suspects.kit, suspects.probes, budget))
        write_results(path, results)
    if "forgery" not in results and "forgery" not in skip:
        results["forgery"] = forge_claims(
            suspects.model, suspects.key, facts, codec, suspects.probes, seed=suspects.config.seed, progress=say
        )
        write_results(path, results)
    return results


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Beside, then renamed; readable by its owner alone, since it says where a mark is weak."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, (json.dumps(results, indent=1) + "\n").encode(), replace=True)


def _order(cases: Iterable[Case]) -> Any:
    places = {case.name: place for place, case in enumerate(cases)}
    return lambda row: (places.get(row["case"], len(places)), row["seed"])


def _identity(suspects: Suspects, facts: Mapping[str, Any]) -> str:
    settings = replace(suspects.config, hours=None, seed=0)
    content = json.dumps([dict(facts), suspects.key.fingerprint, repr(settings), suspects.clean_ppl])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _open_results(path: Path, identity: str, facts: Mapping[str, Any], suspects: Suspects) -> dict[str, Any]:
    if not path.exists():
        watermark = suspects.key.watermarks[0]
        return {
            "format": FORMAT,
            "identity": identity,
            **facts,
            "layers": list(watermark.layers),
            "n_probes": len(suspects.probes),
            "ppl": suspects.clean_ppl,
            "rows": [],
        }
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        same = found["format"] == FORMAT and found["identity"] == identity
    except (ValueError, KeyError, TypeError) as error:
        raise AttackError(f"{path} is not a results file of this command; choose another folder") from error
    if not same:
        raise AttackError(f"{path} holds results of another model, key, corpus or setting; choose another folder")
    assert isinstance(found, dict)
    return found
