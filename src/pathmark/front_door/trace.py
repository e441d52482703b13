"""`pathmark.trace`: which licensee's copy is this?"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pathmark.errors import VerificationError
from pathmark.front_door.bundle import Case, EvidenceConfig, settings_of, write_evidence
from pathmark.front_door.criteria import CommitmentLike, JudgeConfig
from pathmark.front_door.keys import KeyLike, open_key
from pathmark.front_door.suspect import LookConfig, ModelLike, look, name_of
from pathmark.keys import OwnerKey, Registry
from pathmark.keys.keyfile import PassphraseSource
from pathmark.progress import Progress
from pathmark.stats import Family
from pathmark.verification import Criteria, Examined, TracedCopy, examine_routes, trace_copy

RegistryLike = Registry | str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class TraceRoutesConfig:
    """By what a licensee is named."""

    significance: float = 1e-6
    """Family-wise level."""
    suspects: int = 1
    """Models examined in this case."""
    commitment: CommitmentLike | None = None
    """Published commitment of the key, for an evidence bundle."""


@dataclass(frozen=True, kw_only=True)
class TraceConfig(LookConfig, TraceRoutesConfig):
    """The same, and how to look at the weights; what is seen behind an `original` is a lead and names nobody."""


@dataclass(frozen=True)
class Traced(TracedCopy):
    """Whose copy it is, and what that rests on."""

    case: Case | None = field(default=None, repr=False, compare=False)

    def write_evidence(self, path: str | os.PathLike[str], config: EvidenceConfig | None = None) -> Path:
        """Everything that the decision rests on, in a new signed folder or zip, for somebody without the key."""
        assert self.case is not None, "made by `trace`"
        return write_evidence(self.case, path, config)


def trace(
    suspect: ModelLike,
    key: KeyLike,
    registry: RegistryLike,
    config: TraceConfig | None = None,
    *,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
) -> Traced:
    """Name the licensee whose copy a suspect comes from, if one can be named.

    Example:
        pathmark.trace("./leaked", "master.key", "licensees.db").words()
    """
    config = config or TraceConfig()
    owner, book = _opened(key, registry, passphrase)
    way = replace(config.examine, decoys=0)
    examined = look(suspect, owner, replace(config, examine=way), progress)
    original = None if config.original is None else name_of(config.original)
    settings = settings_of(way, original=original, base=config.base)
    return _named(name_of(suspect), owner, examined, book, config, settings)


def trace_routes(
    file: str | os.PathLike[str],
    key: KeyLike,
    registry: RegistryLike,
    config: TraceRoutesConfig | None = None,
    *,
    passphrase: PassphraseSource = None,
) -> Traced:
    """The same from routes that a serving engine recorded.

    Example:
        pathmark.trace_routes("recorded.jsonl", "master.key", "licensees.db").words()
    """
    owner, book = _opened(key, registry, passphrase)
    return _named(os.fspath(file), owner, examine_routes(Path(file), owner), book, config or TraceRoutesConfig(), {})


def _opened(key: KeyLike, registry: RegistryLike, passphrase: PassphraseSource) -> tuple[OwnerKey, Registry]:
    owner = open_key(key, passphrase)
    book = registry if isinstance(registry, Registry) else Registry(Path(registry))
    book.check_whole(owner)
    return owner, book


def _named(
    suspect: str, key: OwnerKey, examined: Examined, book: Registry, config: TraceRoutesConfig, settings: dict[str, Any]
) -> Traced:
    criteria = Criteria(significance=config.significance, family=Family(suspects=config.suspects))
    copy = trace_copy(key, examined.evidence, book.entries(), criteria=criteria, fed=examined.fed)
    if copy.result.decision == "none" and examined.mute is not None:
        raise VerificationError(f"nobody can be named: {examined.mute}")
    number = copy.ids[copy.result.best] if copy.decision in ("licensee", "several") else None
    case = Case(
        suspect=suspect, access=examined.access, key=key, wording=copy.wording(),
        summary={"suspect": suspect, **copy.summary()}, examined=examined, id=number, settings=settings,
        judged=JudgeConfig(commitment=config.commitment),
    )  # fmt: skip
    return Traced(copy.result, copy.ids, copy.n_probes, copy.n_tokens, copy.behind, case)
