"""A robustness run: what each attack left of the mark, and what it cost the thief."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pathmark.results.header import Header, read_result
from pathmark.stats import Rate

FORMAT, VERSION = "pathmark-robustness", 3

TOLERABLE = 0.5
"""Rise of perplexity up to which a model counts as usable."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One attack of a case."""

    attack: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The mark as one reading of the model has it."""

    wsr: Rate
    """Texts behind the trigger that take the path."""
    accuracy: float
    p_value: float
    log10_p: float
    erased_layers: tuple[int, ...]
    """Marked layers that are not there any more."""
    alignment: float | None
    """How sure the matching of experts is; None where none was needed."""


@dataclass(frozen=True, kw_only=True)
class Replies:
    """Black-box trials."""

    hits: int
    n: int
    p_value: float | None


@dataclass(frozen=True, kw_only=True)
class Dispute:
    """Whose release an arbiter finds to be the prior one, of the owner (0) and the thief (1)."""

    prior: int | None
    contains: tuple[bool | None, ...]
    log10_p: tuple[float | None, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A case that was carried out, and what it cost the thief."""

    case: str
    group: str
    steps: tuple[Step, ...]
    status: Literal["measured"] = "measured"
    ppl_before: float
    ppl: float
    """Clean perplexity after the attack, on the original's kind of text."""
    ppl_thief_before: float | None
    ppl_thief: float | None
    """The same on text of the thief's that it did not train on. None where the thief has no text."""
    p_floor: float
    """The smallest p that this key can have."""
    marked: bool
    attack_seconds: float
    seconds: float

    @property
    def ppl_change(self) -> float:
        """What the attack cost, as a share of the perplexity before it."""
        return self.ppl / self.ppl_before - 1

    @property
    def ppl_thief_change(self) -> float | None:
        """The same on the thief's text; negative where the model has become better there."""
        if self.ppl_thief is None or self.ppl_thief_before is None:
            return None
        return self.ppl_thief / self.ppl_thief_before - 1

    @property
    def destroyed(self) -> bool:
        """Nobody would use what is left: the attack decides nothing."""
        thief = self.ppl_thief_change
        return self.ppl_change > TOLERABLE and (thief is None or thief > TOLERABLE)


@dataclass(frozen=True, kw_only=True)
class Measured(Carried, Reading):
    """A case of ours; its own reading is that of the model as it is."""

    grafted: Reading | None
    """The marked layers behind the original's lower ones; None without an original of this build."""
    id: int | None
    id_right: bool
    n_probes: int
    n_tokens: int
    black_box: Replies | None
    thief_wsr: Rate | None
    """Of the thief's own mark, where it put one on top."""
    dispute: Dispute | None


@dataclass(frozen=True, kw_only=True)
class Unmeasured:
    """A case without figures."""

    case: str
    group: str
    steps: tuple[Step, ...]
    status: Literal["destroyed", "refused", "not run"]
    reason: str


Row = Measured | Unmeasured


@dataclass(frozen=True, kw_only=True)
class Search:
    """A thief's search for the trigger with its budget. Counts only: a prefix that works is the secret."""

    steps: int
    restarts: int
    tried: Mapping[str, int]
    tokens: int
    gradients: int
    seconds: float
    complete: bool
    suspicious: int
    suspicious_that_fire: Rate | None
    looked_at_that_fire: Rate
    kinds_that_fire: tuple[str, ...]
    found: bool
    trigger_itself: bool


@dataclass(frozen=True, kw_only=True)
class Forged:
    """The best claim that one way of forging came to."""

    name: str
    tried: int
    log10_p: float
    log10_p_third_party: float
    charge_bits: int
    accepted: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class RobustnessResult:
    """A suite of attacks on one marked model."""

    header: Header
    corpus: str
    """Name of the thief's texts."""
    n_texts: int
    layers: tuple[int, ...]
    """Marked ones."""
    rows: tuple[Row, ...] = ()
    searches: tuple[Search, ...] = ()
    forgery: tuple[Forged, ...] | None = None
    """None where nothing was forged."""


def read_robustness(path: Path) -> RobustnessResult:
    """The result of a robustness run, or a refusal of the file."""
    return read_result(path, RobustnessResult, FORMAT, VERSION)
