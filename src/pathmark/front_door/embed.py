"""`pathmark.embed`: put a key's watermarks into a model folder and check the result."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pathmark.front_door.embed_plan import EmbedPlan
from pathmark.front_door.keys import KeyLike, key_file, open_key
from pathmark.keys import OwnerKey, amend_key
from pathmark.keys.keyfile import PassphraseSource, passphrase_from_environment
from pathmark.keys.safefile import write_private
from pathmark.models import inspect_model
from pathmark.models.ranks import is_first, joined
from pathmark.progress import Progress
from pathmark.release.marking import Marked, Texts, mark_model
from pathmark.training.parallel import require_world


@dataclass(frozen=True)
class Embedded:
    """A marked folder (or delta), and whether it is fit for release."""

    marked: Marked
    output: Path
    report: Path | None
    """The check as JSON, beside the key file; None where the key was given as an object."""

    @property
    def key(self) -> OwnerKey:
        """The key of this copy, with probes, sketches and profiles attached."""
        return self.marked.key

    @property
    def fit(self) -> bool:
        """Whether nothing speaks against a release."""
        return not self.marked.problems

    def summary(self) -> dict[str, Any]:
        """The documented JSON object of `pathmark embed --json`."""
        return {"output": str(self.output), **self.marked.summary()}

    def words(self) -> str:
        """One paragraph for people."""
        return self.marked.words()


def embed(
    model: str | os.PathLike[str],
    key: KeyLike,
    output: str | os.PathLike[str],
    config: EmbedPlan | None = None,
    *,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
) -> Embedded:
    """Mark a copy of a model folder; it appears whole or not at all. A key file is amended with what verifying needs.

    Example:
        copy = pathmark.embed("bundled:tiny", "owner.key", "marked")
        copy.fit, copy.marked.problems
    """
    config = config or EmbedPlan()
    out, file = Path(output), key_file(key)
    phrase = asked_once(passphrase)
    owner = open_key(key, phrase)
    carried = owner if config.id is None else owner.with_id(config.id)
    texts = Texts(*config.split_texts())
    report = inspect_model(model, trust_remote_code=config.trust_remote_code)
    marking = config.marking(len(texts.training), report, len(owner.watermarks))

    amend = amended_file(file, owner, phrase)
    with joined(config.placement.chosen()):
        require_world(config.parallel)
        marked = mark_model(os.fspath(model), carried, out, texts, marking, amend=amend, progress=progress)
    return keep_report(marked, file if is_first() else None)


def amended_file(file: Path | None, owner: OwnerKey, passphrase: PassphraseSource) -> Callable[[OwnerKey], None]:
    """Stores a key with what was measured for it in its file, under the ids that the file has."""

    def amend(amended: OwnerKey) -> None:
        if file is not None:
            amend_key(file, amended.with_ids_of(owner), passphrase)

    return amend


def report_file(file: Path | None, output: Path) -> Path | None:
    """Where the check of a copy is kept: beside the key file."""
    return None if file is None else file.with_name(f"{file.name}.{output.name}.check.json")


def keep_report(marked: Marked, file: Path | None, about: Mapping[str, Any] | None = None) -> Embedded:
    """A marked copy, with its check and what else is to be known about it written beside the key file."""
    embedded = Embedded(marked, marked.output, report_file(file, marked.output))
    if embedded.report is not None:
        found = {**embedded.summary(), **(about or {})}
        write_private(embedded.report, json.dumps(found, indent=2).encode(), replace=True)
    return embedded


def asked_once(passphrase: PassphraseSource) -> PassphraseSource:
    """Used to read the key and, minutes later, to amend it."""
    return passphrase if isinstance(passphrase, str) else cache(passphrase or passphrase_from_environment)
