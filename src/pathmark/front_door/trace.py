"""`pathmark.trace`: which licensee's copy is this?"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from pathmark.errors import KeyFileError, VerificationError
from pathmark.front_door.keys import KeyLike, open_key
from pathmark.front_door.suspect import LookConfig, ModelLike, look
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


@dataclass(frozen=True, kw_only=True)
class TraceConfig(LookConfig, TraceRoutesConfig):
    """The same, and how to look at the weights; what is seen behind an `original` is a lead and names nobody."""


def trace(
    suspect: ModelLike,
    key: KeyLike,
    registry: RegistryLike,
    config: TraceConfig | None = None,
    *,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
) -> TracedCopy:
    """Name the licensee whose copy a suspect comes from, if one can be named.

    Example:
        pathmark.trace("./leaked", "master.key", "licensees.db").words()
    """
    config = config or TraceConfig()
    owner, book = _opened(key, registry, passphrase)
    way = replace(config.examine, decoys=0)
    return _named(owner, look(suspect, owner, replace(config, examine=way), progress), book, config)


def trace_routes(
    file: str | os.PathLike[str],
    key: KeyLike,
    registry: RegistryLike,
    config: TraceRoutesConfig | None = None,
    *,
    passphrase: PassphraseSource = None,
) -> TracedCopy:
    """The same from routes that a serving engine recorded.

    Example:
        pathmark.trace_routes("recorded.jsonl", "master.key", "licensees.db").words()
    """
    owner, book = _opened(key, registry, passphrase)
    return _named(owner, examine_routes(Path(file), owner), book, config or TraceRoutesConfig())


def _opened(key: KeyLike, registry: RegistryLike, passphrase: PassphraseSource) -> tuple[OwnerKey, Registry]:
    owner = open_key(key, passphrase)
    book = registry if isinstance(registry, Registry) else Registry(Path(registry))
    book.check_key(owner)
    if problems := book.problems():
        raise KeyFileError(f"{book.path} names nobody: {problems[0]}")
    return owner, book


def _named(key: OwnerKey, examined: Examined, book: Registry, config: TraceRoutesConfig) -> TracedCopy:
    criteria = Criteria(significance=config.significance, family=Family(suspects=config.suspects))
    traced = trace_copy(key, examined.evidence, book.entries(), criteria=criteria, fed=examined.fed)
    if traced.result.decision == "none" and examined.mute is not None:
        raise VerificationError(f"nobody can be named: {examined.mute}")
    return traced
