"""A suite of attacks on a marked model: what is left of the mark, and what it cost the thief."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pathmark.attacks import find_attack
from pathmark.errors import AttackError, MissingLibraryError
from pathmark.evaluate.robustness import Suspects, run_adversaries
from pathmark.evaluate.stolen import RobustnessConfig, Sources, run_suite
from pathmark.evaluate.suites import SUITES, Case
from pathmark.evaluate.thief import make_kit
from pathmark.front_door.attack import load_fast, thief_texts
from pathmark.front_door.keys import KeyLike, open_key
from pathmark.keys.keyfile import PassphraseSource
from pathmark.models import load_tokenizer
from pathmark.models.describe import describe_model
from pathmark.models.devices import Placement
from pathmark.models.texts import Texts
from pathmark.progress import Progress, Silent
from pathmark.reporting.evidence_plane import plot
from pathmark.reporting.robustness_report import report
from pathmark.results.robustness import Measured, RobustnessResult
from pathmark.results.schema import to_json


@dataclass(frozen=True, kw_only=True)
class RobustnessPlan:
    """Which attacks, with what, measured how."""

    suite: Literal["core", "paper", "full"] = "full"
    only: tuple[str, ...] = ()
    """Only these attacks or rows of the suite."""
    skip: tuple[str, ...] = ()
    """All but these; also `search` and `forgery`."""
    original: str | None = None
    """The unmarked original, for attacks that compare with it."""
    sibling: str | None = None
    """Another licensee's copy, for a thief who has two."""
    texts: Texts | None = None
    """The thief's ordinary text. None: the bundled one."""
    measure: RobustnessConfig = field(default_factory=RobustnessConfig)
    trust_remote_code: bool = False
    placement: Placement = field(default_factory=Placement)

    def cases(self) -> list[Case]:
        """The rows of the suite that are left, the one without an attack among them.

        Attacks one after the other are only meant where each of them is. What runs at the best rate of a sweep brings
        its sweep along.
        """
        suite, only, skip = SUITES[self.suite], set(self.only), set(self.skip)
        for name in (only | skip) - {"search", "forgery"} - {case.name for case in suite}:
            find_attack(name)
        attacks = {case.name: {step.attack for step in case.steps} for case in suite}
        wanted = [
            case for case in suite if not only or case.name in only or (case.steps and attacks[case.name] <= only)
        ]
        for case in [case for case in wanted if case.best_of]:
            if not any(other.name.startswith(case.best_of) for other in wanted if other is not case):
                wanted += [other for other in suite if other.name.startswith(case.best_of)]
        kept = [case for case in suite if not {case.name, *attacks[case.name]} & skip]
        cases = [case for case in kept if case in wanted or not case.steps]
        if len(cases) < 2:
            raise AttackError(f"no attack of the {self.suite} suite is left by --only and --skip")
        return cases


@dataclass(frozen=True)
class Robustness:
    """The rows of a suite, kept in a folder with a table and a plot."""

    results: RobustnessResult
    output: Path
    plotted: bool

    def summary(self) -> dict[str, Any]:
        """The content of results.json."""
        found: dict[str, Any] = to_json(self.results)
        return found

    def words(self) -> str:
        """One sentence for people."""
        measured = [row for row in self.results.rows if isinstance(row, Measured)]
        return (
            f"{sum(row.marked for row in measured)} of {len(measured)} measured attacks leave the mark provable at "
            f"1e-6. Results: {self.output / 'results.json'}, {self.output / 'table.md'}, "
            + (str(self.output / "evidence.png") if self.plotted else "and no plot: that needs pathmark[plots]")
        )


def measure_robustness(
    model: str | os.PathLike[str],
    key: KeyLike,
    output: str | os.PathLike[str],
    config: RobustnessPlan | None = None,
    *,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
) -> Robustness:
    """Carry out the suite on a marked model; a folder that was begun goes on."""
    config = config or RobustnessPlan()
    say, name, out, trusted = progress or Silent(), os.fspath(model), Path(output), config.trust_remote_code
    owner, cases, texts = open_key(key, passphrase), config.cases(), thief_texts(config.texts)
    say.stage("loading", None)
    suspect = load_fast(name, trusted, config.placement)
    original, sibling = (
        None if source is None else load_fast(source, trusted, config.placement)
        for source in (config.original, config.sibling)
    )
    tokenizer = load_tokenizer(name, trust_remote_code=trusted)
    kit = make_kit(tokenizer, texts, owner, original=original, sibling=sibling, progress=say)
    suspects = Suspects(suspect, owner, kit, config.measure)
    results = run_suite(suspects, cases, out, sources_of(name, config), progress=say)
    if config.suite != "paper" and not config.only:
        described, codec, _ = describe_model(name, trust_remote_code=trusted)
        results = run_adversaries(suspects, out, described, codec, skip=config.skip, progress=say)
    (out / "table.md").write_text(report({results.corpus: [results]}), encoding="utf-8")
    return Robustness(results, out, plotted=_plot(results, out / "evidence.png"))


def sources_of(model: str, config: RobustnessPlan) -> Sources:
    """What the result file says of models and texts."""
    texts = config.texts
    if texts is not None and not isinstance(texts, str | os.PathLike):
        return replace(Sources.of(model, config.original), corpus="given")
    return Sources.of(model, config.original, None if texts is None else Path(texts))


def _plot(result: RobustnessResult, path: Path) -> bool:
    """Whether the plot could be drawn; hours of measuring are not lost to a missing library."""
    try:
        plot([("", result.rows)], path)
    except MissingLibraryError:
        return False
    return True
