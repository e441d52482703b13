"""`pathmark.verify` and `pathmark.verify_routes`: is a key's mark in these weights, in these recorded routes?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pathmark.errors import VerificationError
from pathmark.front_door.bundle import Case, EvidenceConfig, settings_of, write_evidence
from pathmark.front_door.criteria import JudgeConfig
from pathmark.front_door.keys import KeyLike, open_key
from pathmark.front_door.suspect import LookConfig, ModelLike, at_hand, confined, look, name_of
from pathmark.keys import ClaimedKey, OwnerKey, VerifierKey
from pathmark.keys.keyfile import PassphraseSource
from pathmark.models import bundled_probes
from pathmark.progress import Progress, Silent
from pathmark.stats import PValue
from pathmark.verification import (
    Criteria,
    Examined,
    Verdict,
    examine_routes,
    judge,
    profile_texts,
    with_reference,
    write_log,
)


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(LookConfig, JudgeConfig):
    """How to look at the weights, and by what to judge."""

    reference: str | os.PathLike[str] | None = None
    """Owner's own release or original: match experts to it instead of the key's profiles."""


@dataclass(frozen=True, kw_only=True)
class RoutesConfig(JudgeConfig):
    """How to read recorded routes, and by what to judge."""

    align: bool = True
    """Match experts first; False takes them by their numbers."""


@dataclass(frozen=True)
class Verification:
    """The verdict on one suspect, and how it was had."""

    suspect: str
    access: str
    """`weights`, `streamed weights`, `routes` or `replies`."""
    verdict: Verdict
    key: VerifierKey
    examined: Examined | None = None
    """The evidence, where weights or routes were read."""
    original: str | None = None
    judged: JudgeConfig | None = None
    """By what, and with which commitment."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How it was looked at, for an evidence bundle."""
    transcript: bytes | None = None
    """What was asked and said, where it was kept for an evidence bundle."""

    @property
    def marked(self) -> bool:
        """Whether the mark is there."""
        return self.verdict.marked

    @property
    def p(self) -> PValue | None:
        """The owner's p-value, corrected for the family; None where nothing bounds chance."""
        return self.verdict.p

    @property
    def exit_code(self) -> int:
        """0 marked, 1 not marked, 2 undecided."""
        return self.verdict.exit_code

    def summary(self) -> dict[str, Any]:
        """The documented JSON object of `pathmark verify --json` and its siblings."""
        return {"suspect": self.suspect, "access": self.access, **self.verdict.summary()}

    def words(self) -> str:
        """The verdict for people."""
        return self.verdict.words()

    def write_evidence(self, path: str | os.PathLike[str], config: EvidenceConfig | None = None) -> Path:
        """Everything that the verdict rests on, in a new signed folder or zip, for somebody without the key."""
        if self.examined is None and self.transcript is None:
            raise VerificationError("nothing was kept of the replies: set ApiConfig(keep=True), or a log")
        case = Case(
            suspect=self.suspect, access=self.access, key=self.key, wording=self.verdict.wording(),
            summary=self.summary(), examined=self.examined, transcript=self.transcript, judged=self.judged,
            settings=self.settings,
        )  # fmt: skip
        return write_evidence(case, path, config)

    def write_log(self, folder: str | os.PathLike[str], *, obtained: str = "not stated") -> None:
        """Keep raw results and digests in a new folder; `obtained` says how the suspect was had."""
        if self.examined is None:
            raise VerificationError("replies are logged while they come: set ApiConfig(log=FILE)")
        write_log(
            Path(folder), self.key, self.examined, self.summary(),
            suspect=self.suspect, obtained=obtained, original=self.original,
        )  # fmt: skip


def verify(
    suspect: ModelLike,
    key: KeyLike | ClaimedKey,
    config: VerifyConfig | None = None,
    *,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
) -> Verification:
    """Test whether a key's mark is in a model: experts are matched blind to the secret, then an exact test decides.

    An arbiter has a claim (`pathmark.open_claim`) in the place of the key, and gets the third party's verdict.

    Example:
        found = pathmark.verify("./suspect", "owner.key")
        found.marked, found.p, found.words()
    """
    config = config or VerifyConfig()
    held = key if isinstance(key, ClaimedKey) else open_key(key, passphrase)
    criteria = config.criteria_for(held)
    if isinstance(held, OwnerKey):
        held, criteria = _as_the_owner_chose(held, config, criteria, progress or Silent())
    else:
        config = _as_an_arbiter_may(held, config)
    examined = look(suspect, held, config, progress)
    original = None if config.original is None else name_of(config.original)
    verdict = judge(held, examined.evidence, examined.fed, criteria, examined.notes, examined.mute)
    settings = settings_of(config.examine, original=original, base=config.base, reference=config.reference)
    return Verification(name_of(suspect), examined.access, verdict, held, examined, original, config, settings)


def _as_the_owner_chose(
    key: OwnerKey, config: VerifyConfig, criteria: Criteria, progress: Progress
) -> tuple[OwnerKey, Criteria]:
    """The key with the profiles of a given reference; and texts that were chosen for this reading date nothing."""
    if config.texts is not None and criteria.anchor is not None and criteria.anchor.anchored:
        chosen = criteria.anchor.undated("the texts that the suspect was read with were chosen for this reading")
        criteria = replace(criteria, anchor=chosen)
    if config.reference is not None:
        progress.stage("reference", None)
        key = _matched_to(key, os.fspath(config.reference), config)
    return key, criteria


def _as_an_arbiter_may(key: ClaimedKey, config: VerifyConfig) -> VerifyConfig:
    """The arbiter's own texts, those that were committed, or public ones; nothing else that a claimant could name."""
    given = {"--original": config.original, "--reference": config.reference, "a commitment": config.commitment}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise VerificationError(
            f"{wrong[0]} goes with a key, not with a claim: a third party reads the suspect as it is, by what the "
            "claim's own commitment holds; leave it out"
        )
    if config.texts is None and not profile_texts(key):
        return replace(config, texts=bundled_probes())
    return config


def _matched_to(key: OwnerKey, reference: str, config: VerifyConfig) -> OwnerKey:
    """The key with the reference's profiles, made where the suspect is read: a fork must come before any computing."""
    remote = config.examine.trust_remote_code
    if not config.sandbox:
        return with_reference(key, reference, trust_remote_code=remote)
    here = at_hand(reference, remote)

    def profiles(_: Progress) -> dict[str, bytes]:
        return dict(with_reference(key, here, trust_remote_code=remote).attachments)

    for name, data in confined(profiles, here, None, remote=remote).items():
        if key.attachments.get(name) != data:
            key = key.attach(name, data)
    return key


def verify_routes(
    file: str | os.PathLike[str],
    key: KeyLike,
    config: RoutesConfig | None = None,
    *,
    passphrase: PassphraseSource = None,
) -> Verification:
    """The same from routes that a serving engine recorded for the texts of `pathmark probes` (docs/routes.md).

    Example:
        pathmark.verify_routes("recorded.jsonl", "owner.key").marked
    """
    config = config or RoutesConfig()
    owner = open_key(key, passphrase)
    criteria = config.criteria_for(owner)
    examined = examine_routes(Path(file), owner, aligned=config.align)
    verdict = judge(owner, examined.evidence, examined.fed, criteria, examined.notes)
    settings = settings_of(None, align=config.align)
    return Verification(os.fspath(file), examined.access, verdict, owner, examined, None, config, settings)
