"""`pathmark.embed_all`: a copy for every licensee of a registry."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathmark.errors import EmbeddingError
from pathmark.front_door.embed import Embedded, amended_file, asked_once, keep_report
from pathmark.front_door.embed_plan import EmbedPlan
from pathmark.front_door.keys import KeyLike, key_file, open_key
from pathmark.keys import OwnerKey, Registry
from pathmark.keys.keyfile import PassphraseSource
from pathmark.models import inspect_model
from pathmark.models.ranks import require_alone
from pathmark.progress import Progress
from pathmark.release.copies import Licence, copy_name, mark_copies
from pathmark.release.estimate import Estimate, estimate
from pathmark.release.marking import Marked, MarkingConfig, Texts


@dataclass(frozen=True)
class Copies:
    """The copies of all licensees: those that were made now, and those that were there."""

    made: dict[str, Embedded]
    """By licensee."""
    there: tuple[str, ...]
    """Licensees whose copies an earlier run has made."""
    seconds: float
    """Wall time of everything."""

    @property
    def fit(self) -> bool:
        """Whether every copy that was made now may be released."""
        return all(copy.fit for copy in self.made.values())

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark embed --all --json`."""
        made = {name: copy.summary() for name, copy in self.made.items()}
        return {"made": made, "there": list(self.there), "seconds": self.seconds}

    def words(self) -> str:
        """A sentence per copy."""
        lines = [f"{name}: {copy.words()}" for name, copy in self.made.items()]
        lines += [f"{name}: its copy was there already." for name in self.there]
        return "\n".join(lines)


def embed_all(
    model: str | os.PathLike[str],
    key: KeyLike,
    registry: str | os.PathLike[str],
    output: str | os.PathLike[str],
    config: EmbedPlan | None = None,
    *,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
) -> Copies:
    """Mark a copy for every licensee of a registry, each in a folder of its own below `output`.

    The trigger is learnt once; further copies go on from the first and take a third of its steps. A run that was
    stopped goes on with `resume`; copies that are there stay as they are.

    Example:
        copies = pathmark.embed_all("bundled:tiny", "master.key", "licensees.db", "copies")
        copies.fit, list(copies.made)
    """
    started, config = time.monotonic(), config or EmbedPlan()
    phrase, file = asked_once(passphrase), key_file(key)
    owner = open_key(key, phrase)
    licences = _licences(registry, owner, Path(output), config)
    texts, marking = _prepared(model, owner, config)
    made: dict[str, Embedded] = {}

    def finished(licence: Licence, marked: Marked) -> None:
        made[licence.licensee] = keep_report(marked, file)

    there = tuple(licence.licensee for licence in licences if licence.output.exists())
    mark_copies(
        os.fspath(model), owner, licences, texts, marking,
        amend=amended_file(file, owner, phrase), finished=finished, progress=progress,
    )  # fmt: skip
    return Copies(made, there, time.monotonic() - started)


def estimate_embedding(
    model: str | os.PathLike[str],
    key: KeyLike,
    config: EmbedPlan | None = None,
    *,
    registry: str | os.PathLike[str] | None = None,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
) -> Estimate:
    """What `embed`, or `embed_all` with a registry, would take on this machine; nothing is written."""
    require_alone("an estimate")
    config = config or EmbedPlan()
    owner = open_key(key, passphrase)
    texts, marking = _prepared(model, owner, config)
    copies = 1 if registry is None else len(_licences(registry, owner, Path(), config))
    return estimate(os.fspath(model), owner, texts, marking, copies=copies, progress=progress)


def _prepared(model: str | os.PathLike[str], key: OwnerKey, config: EmbedPlan) -> tuple[Texts, MarkingConfig]:
    texts, report = Texts(*config.split_texts()), inspect_model(model, trust_remote_code=config.trust_remote_code)
    return texts, config.marking(len(texts.training), report, len(key.watermarks))


def _licences(registry: str | os.PathLike[str], key: OwnerKey, folder: Path, config: EmbedPlan) -> Sequence[Licence]:
    if config.id is not None:
        raise EmbeddingError("a registry says who has which id; leave out --id")
    book = Registry(Path(registry))
    book.check_whole(key)
    entries = book.entries()
    if not entries:
        raise EmbeddingError(f"{registry} has no licensees yet; add them with `pathmark issue`")
    suffix = ".safetensors" if config.delta else ""
    return [Licence(e.licensee, e.id, folder / f"{copy_name(e.licensee, e.id)}{suffix}") for e in entries]
