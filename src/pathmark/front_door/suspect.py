"""A suspect at the front door: a folder, a hub id, an adapter or a loaded model; looked at in one way."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

from transformers import PreTrainedModel

from pathmark.errors import ModelError, VerificationError
from pathmark.front_door import sandbox
from pathmark.keys import VerifierKey
from pathmark.models import local_folder
from pathmark.models.devices import open_model
from pathmark.models.ranks import announced, joined
from pathmark.models.suspects import is_adapter
from pathmark.models.texts import Texts, given_texts
from pathmark.progress import Progress, Silent
from pathmark.verification import (
    ExamineConfig,
    Examined,
    ReadWith,
    count_rows,
    examine,
    profile_texts,
    record_evidence,
    record_grafted,
)

T = TypeVar("T")
ModelLike: TypeAlias = str | os.PathLike[str] | PreTrainedModel
"""A name, or a model in memory."""


@dataclass(frozen=True, kw_only=True)
class LookConfig:
    """How to look at a suspect's weights."""

    examine: ExamineConfig = field(default_factory=ExamineConfig)
    original: ModelLike | None = None
    """The unmarked original: also read the suspect's marked layers behind its lower ones."""
    base: str | os.PathLike[str] | None = None
    """Base model of a peft adapter, if its config does not name the right one."""
    texts: Texts | None = None
    """Probe texts: a file, a folder or the texts themselves. None: those in the key."""
    sandbox: bool = False
    """Read the suspect in a child process without network, with bounded memory and patience, as the command line does.
    For a process that has not computed with torch yet. A model in memory is read where it is."""


def name_of(suspect: ModelLike) -> str:
    """How a suspect is called in results."""
    if isinstance(suspect, PreTrainedModel):
        return str(getattr(suspect.config, "_name_or_path", "") or type(suspect).__name__)
    return os.fspath(suspect)


def look(suspect: ModelLike, key: VerifierKey, config: LookConfig, progress: Progress | None) -> Examined:
    """Record everything that a verdict needs; the processes that torchrun started run a share of the texts each."""
    if announced() > 1 and config.sandbox:
        raise VerificationError(
            f"the {announced()} processes of torchrun talk to each other, which a sandbox forbids; add --no-sandbox "
            "where you trust the suspect's files, or read it in one process"
        )
    with joined(config.examine.placement.chosen()):
        return _look(suspect, key, config, progress)


def _look(suspect: ModelLike, key: VerifierKey, config: LookConfig, progress: Progress | None) -> Examined:
    if isinstance(suspect, PreTrainedModel):
        return _look_at_loaded(suspect, key, config, progress or Silent())
    if isinstance(config.original, PreTrainedModel):
        raise VerificationError("a loaded original is read behind a loaded suspect; give both by name, or both loaded")
    texts = None if config.texts is None else given_texts(config.texts)
    remote = config.examine.trust_remote_code

    def here(given: str | os.PathLike[str] | None) -> str | None:
        return None if given is None else at_hand(given, remote) if config.sandbox else os.fspath(given)

    name, base, original = here(suspect) or "", here(config.base), here(config.original)

    looked = config.examine
    if config.sandbox:
        looked = replace(looked, placement=looked.placement.confined())

    def read(say: Progress) -> Examined:
        return examine(name, key, looked, texts=texts, base=base, original=original, progress=say)

    return confined(read, name, progress, remote=remote) if config.sandbox else read(progress or Silent())


def at_hand(name: str | os.PathLike[str], trust_remote_code: bool) -> str:
    """A model's folder; a hub id is downloaded first, but for one whose own code is run and has to be had as well."""
    if is_adapter(name) or trust_remote_code:
        return os.fspath(name)
    return str(local_folder(name))


def confined(job: Callable[[Progress], T], name: str, progress: Progress | None, *, remote: bool = False) -> T:
    """Do a job on the folder of this name in the sandbox; a hub id whose own code is run needs its network."""
    return sandbox.run(job, sandbox.Limits.for_files(name, network=remote and not Path(name).is_dir()), progress)


def _look_at_loaded(model: PreTrainedModel, key: VerifierKey, config: LookConfig, say: Progress) -> Examined:
    """The key's own texts, as token ids: a model in memory comes without a tokenizer, so there are no decoys."""
    probes = profile_texts(key)[: config.examine.n_probes]
    if config.texts is not None or config.base is not None or not probes:
        raise VerificationError(
            "a loaded model is probed with the texts that `embed` left in the key; give a model folder to use other "
            "texts, an adapter's base, or a key that was never embedded"
        )
    aligned = config.examine.align
    original = config.original
    if original is not None and not isinstance(original, PreTrainedModel):
        original = open_model(
            original, config.examine.placement, trust_remote_code=config.examine.trust_remote_code
        ).to(model.device)
    notes = ["no decoy triggers were drawn, since a loaded model comes without its tokenizer"]
    read_with = ReadWith(tuple(probes))
    say.stage("probes", count_rows(key, probes, aligned=aligned))
    evidence = record_evidence(model, key, probes, aligned=aligned, progress=say)
    examined = Examined(evidence, "weights", read_with=read_with)
    if original is not None:
        try:
            examined = replace(examined, fed=record_grafted(model, original, key, probes, aligned=aligned))
        except ModelError as error:
            notes.append(f"the suspect was not read behind the original's lower layers: {error}")
    return replace(examined, notes=tuple(notes))
