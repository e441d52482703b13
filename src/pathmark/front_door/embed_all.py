"""`pathmark.embed_all`: a copy for every licensee of a registry."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from pathmark.errors import EmbeddingError
from pathmark.front_door.embed import Embedded, amended_file, asked_once, keep_report, report_file
from pathmark.front_door.embed_plan import EmbedPlan
from pathmark.front_door.keys import KeyLike, key_file, open_key
from pathmark.keys import OwnerKey, Registry
from pathmark.keys.digests import file_digest
from pathmark.keys.keyfile import PassphraseSource
from pathmark.models import inspect_model
from pathmark.models.checkpoint import base_digest
from pathmark.models.loading import local_folder
from pathmark.models.ranks import require_alone
from pathmark.progress import Progress
from pathmark.release.copies import Licence, copy_name, mark_copies, require_one_process
from pathmark.release.estimate import Estimate, estimate
from pathmark.release.marking import Marked, MarkingConfig, Texts
from pathmark.results.header import texts_digest

COPY_OF = "copy_of"
"""In the check of a licensee's copy: of what it is a copy, and how it was made."""


@dataclass(frozen=True)
class Copies:
    """The copies of all licensees: those that were made now, and those that were there."""

    made: dict[str, Embedded]
    """By licensee."""
    there: Mapping[str, bool]
    """Licensees whose copies an earlier run has made, and whether those were fit for release."""
    seconds: float
    """Wall time of everything."""

    @property
    def fit(self) -> bool:
        """Whether every copy may be released, those that were there included."""
        return all(copy.fit for copy in self.made.values()) and all(self.there.values())

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark embed --all --json`."""
        made = {name: copy.summary() for name, copy in self.made.items()}
        return {"made": made, "there": dict(self.there), "fit": self.fit, "seconds": self.seconds}

    def words(self) -> str:
        """A sentence per copy."""
        lines = [f"{name}: {copy.words()}" for name, copy in self.made.items()]
        for name, fit in self.there.items():
            lines.append(f"{name}: its copy was there already, and is {'' if fit else 'not '}fit for release.")
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
    require_one_process(config.parallel)
    phrase, file = asked_once(passphrase), key_file(key)
    if file is None:
        raise EmbeddingError("expected a key file, beside which the checks of copies are kept, got a key in memory")
    owner = open_key(key, phrase)
    licences = _licences(registry, owner, Path(output), config)
    texts, marking = _prepared(model, owner, config)
    made: dict[str, Embedded] = {}

    recipe = _recipe(model, owner, texts, marking)

    def finished(licence: Licence, marked: Marked) -> None:
        about = {COPY_OF: {**recipe, "id": licence.id, "sha256": _digest(licence.output)}}
        made[licence.licensee] = keep_report(marked, file, about)

    there = {one.licensee: _fitness(one, file, recipe) for one in licences if one.output.exists()}
    mark_copies(
        os.fspath(model), owner, licences, texts, marking,
        amend=amended_file(file, owner, phrase), finished=finished, progress=progress,
    )  # fmt: skip
    return Copies(made, there, time.monotonic() - started)


def _recipe(model: str | os.PathLike[str], key: OwnerKey, texts: Texts, marking: MarkingConfig) -> dict[str, str]:
    """What decides how a licensee's copy comes out, but for the id."""
    how = marking.embedding
    if how is not None:  # neither changes what comes out
        how = replace(how, loop=replace(how.loop, recompute=False, checkpoint_every=1))
    settings = sha256(repr((how, marking.delta)).encode()).hexdigest()
    return {
        "base_sha256": base_digest(local_folder(os.fspath(model))),
        "key": key.fingerprint,
        "settings_sha256": settings,
        "texts_sha256": texts_digest(texts.training),
    }


def _digest(copy: Path) -> str:
    """Of the weights that were written."""
    return base_digest(copy) if copy.is_dir() else file_digest(copy)


def _fitness(licence: Licence, file: Path, recipe: Mapping[str, str]) -> bool:
    """Whether a copy that is there is fit for release. What is no copy of this licensee's is not taken for one."""
    report = report_file(file, licence.output)
    advice = "move it away or choose another folder, and run again"
    assert report is not None
    if not report.exists():
        raise EmbeddingError(f"{licence.output} is there, but no check of it beside the key file; {advice}")
    try:
        found = json.loads(report.read_text(encoding="utf-8"))
        kept, fit = dict(found[COPY_OF]), found["fit"]
    except (ValueError, KeyError, TypeError):
        raise EmbeddingError(f"{report} is not the check of a licensee's copy; {advice}") from None
    expected = {**recipe, "id": licence.id, "sha256": _digest(licence.output)}
    if different := [name.replace("_sha256", "") for name, value in expected.items() if kept.get(name) != value]:
        raise EmbeddingError(
            f"{licence.output} is there, but was made otherwise: {', '.join(different)} differ from what {report.name} "
            f"says; {advice}"
        )
    return fit is True


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
