"""What attacks leave of another scheme's mark: the same suites, seeds and budget, judged by the scheme itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pathmark.attacks import Attacked
from pathmark.baselines import Scheme, SchemeVerdict
from pathmark.errors import AttackError, PathmarkError
from pathmark.evaluate.stolen import Sources, Stolen, same_measurement
from pathmark.evaluate.suites import Case
from pathmark.results.robustness import Unmeasured
from pathmark.results.schemes import FORMAT, VERSION, SchemeMeasured, SchemeRobustness, read_scheme_robustness

TOKENS = 128
"""Of each held-out text, for the perplexity."""


@dataclass
class SchemeSuspects(Stolen[SchemeRobustness]):
    """A model that a scheme has marked; `key` is a SchemeKey."""

    scheme: Scheme[Any]
    settings: Any
    """The scheme's config."""
    texts: Sequence[str]
    """Held-out ones."""
    counted: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if not self.scheme.in_weights:
            raise AttackError(
                f"{self.scheme.name} changes no weights, so attacks on weights say nothing about it; whoever leaves "
                "its generation setting out is rid of the mark"
            )
        super().__post_init__()
        self.counted = self._judged(Attacked(self.model)).counted

    def held_out(self) -> list[tuple[int, ...]]:
        """The held-out texts, as tokens."""
        rows = (tuple(self.kit.tokenizer(text, add_special_tokens=False)["input_ids"][:TOKENS]) for text in self.texts)
        return [row for row in rows if len(row) > 1]

    def begun(self, path: Path, sources: Sources) -> SchemeRobustness:
        """What the file holds of this measurement, or its beginning."""
        header = self.header(sources, FORMAT, VERSION, scheme=self.scheme.name, **self.key.settings)
        if path.exists():
            return same_measurement(path, read_scheme_robustness(path), header)
        return SchemeRobustness(
            header=header,
            scheme=self.scheme.name,
            counted=self.counted,
            corpus=sources.corpus,
            n_texts=len(self.kit.texts),
        )

    def measured(
        self, case: Case, left: Attacked, started: float, attack_seconds: float
    ) -> SchemeMeasured | Unmeasured:
        """The scheme's own verdict, and the perplexity on both texts."""
        try:
            carried = self.carried(case, left.model)
            verdict = self._judged(left)
        except PathmarkError as broken:  # an attack may leave a model that says nothing any more
            return case.without_figures("destroyed", str(broken))
        if verdict.p is None or verdict.p_floor is None:
            return case.without_figures("refused", "this scheme has no p-value here")
        return SchemeMeasured(
            **carried,
            wsr=verdict.wsr,
            p_value=verdict.p.value,
            log10_p=verdict.p.log10,
            p_floor=verdict.p_floor.value,
            marked=verdict.marked,
            attack_seconds=attack_seconds,
            seconds=time.monotonic() - started,
        )

    def _judged(self, left: Attacked) -> SchemeVerdict:
        verdict = self.scheme.verify(left.model, self.kit.tokenizer, self.settings, self.texts)
        if not isinstance(verdict, SchemeVerdict):
            raise AttackError(f"{self.scheme.name} has no rate to measure by; expected a SchemeVerdict")
        return verdict
