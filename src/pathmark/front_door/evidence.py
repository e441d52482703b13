"""`pathmark.check_evidence` and `pathmark.replay_evidence`: does a bundle hold, and does the suspect still say so?

The check needs neither torch nor the key; the replay needs no key.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pathmark.errors import ResultError, VerificationError
from pathmark.keys import ClaimedKey, Commitment, load_commitment, open_claim, parse_commitment
from pathmark.keys.modelroot import model_files, model_root
from pathmark.keys.timestamps import load_trusted
from pathmark.progress import Progress
from pathmark.results.evidence import COMMITMENT, EvidenceBundle, Measured, MeasuredWatermark
from pathmark.results.evidence_check import CheckedEvidence, check_bundle
from pathmark.stats import PValue

if TYPE_CHECKING:
    from pathmark.verification import Examined

PathLike = str | os.PathLike[str]
NEAR: Final = 1e-4
"""Routing shares of two runs that differ by less are the same: other machines round otherwise."""


@dataclass(frozen=True)
class EvidenceCheck:
    """Whether a bundle holds, and what it says."""

    bundle: EvidenceBundle
    found: CheckedEvidence

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return self.found.holds

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark evidence check --json`."""
        found = self.found
        return {
            "holds": self.holds,
            "problems": list(found.problems),
            "limits": list(found.limits),
            "fingerprint": found.fingerprint,
            "root": found.root,
            "existed_by": None if found.existed_by is None else found.existed_by.isoformat(),
            "recomputed": [
                {"watermark": row.watermark, "log10_p": row.p.log10, "choices": row.choices} for row in found.recomputed
            ],
            "words": self.words(),
        }

    def words(self) -> str:
        """Some lines for people."""
        found = self.found
        if not self.holds:
            return "\n".join(["The bundle does not hold.", *(f"  {problem}" for problem in found.problems)])
        suspect = self.bundle.suspect
        lines = [
            "The bundle holds.",
            f"Every byte is as the key {found.fingerprint} signed it.",
            f"It is about {suspect.name}, whose files have the root {found.root}.",
        ]
        lines += [
            f"Watermark {row.watermark} is the one that was committed. Computed again from the record, the chance is "
            f"{row.p.odds} if the owner's secret had nothing to do with this model."
            for row in found.recomputed
        ]
        if found.existed_by is not None:
            lines.append(f"Its commitment existed no later than {found.existed_by:%Y-%m-%d %H:%M} UTC.")
        if found.limits:
            lines += ["", "What this check cannot tell", *(f"  - {limit}" for limit in found.limits)]
        return "\n".join(lines)


def check_evidence(
    bundle: PathLike,
    *,
    commitment: Commitment | PathLike | None = None,
    timestamp_roots: PathLike | None = None,
    block_headers: PathLike | None = None,
) -> EvidenceCheck:
    """Check an evidence bundle: every byte, the opened watermarks, and that the figures follow from the record.

    Give the `commitment` as its owner published it, and the authorities or blocks that you trust with its date.

    Example:
        pathmark.check_evidence("case-17", commitment="owner.commitment.json").words()
    """
    read = EvidenceBundle.load(Path(bundle))
    given = (
        commitment
        if commitment is None or isinstance(commitment, Commitment)
        else load_commitment(os.fspath(commitment))
    )
    return EvidenceCheck(read, check_bundle(read, given, load_trusted(timestamp_roots, block_headers)))


@dataclass(frozen=True)
class ReplayedMark:
    """One opened watermark, as the bundle tells it and as it was measured again."""

    watermark: int
    told: PValue
    again: PValue
    largest: float
    """Largest difference of an expert's share, over all layers."""

    @property
    def same(self) -> bool:
        """Whether both runs say the same."""
        return abs(self.told.log10 - self.again.log10) <= NEAR * max(1, -self.told.log10) and self.largest <= NEAR


@dataclass(frozen=True)
class Replay:
    """Whether a suspect still says what a bundle tells."""

    suspect: str
    same_files: bool
    """Whether its files have the root that the bundle is about."""
    marks: tuple[ReplayedMark, ...]

    @property
    def same(self) -> bool:
        """Whether all figures came out again."""
        return all(mark.same for mark in self.marks)

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark evidence replay --json`."""
        return {
            "suspect": self.suspect,
            "same_files": self.same_files,
            "same_figures": self.same,
            "watermarks": [
                {
                    "watermark": mark.watermark,
                    "log10_p": mark.told.log10,
                    "log10_p_again": mark.again.log10,
                    "largest_difference": mark.largest,
                }
                for mark in self.marks
            ],
            "words": self.words(),
        }

    def words(self) -> str:
        """Some lines for people."""
        lines = ["The same figures came out." if self.same else "Other figures came out."]
        lines.append(
            "The files are those that the bundle is about."
            if self.same_files
            else "The files are not those that the bundle is about: this is another suspect, or another copy of it."
        )
        for mark in self.marks:
            lines.append(
                f"Watermark {mark.watermark}: p = {mark.again} by itself, the bundle says {mark.told}; the largest "
                f"difference of an expert's share is {mark.largest:.2g}."
            )
        return "\n".join(lines)


def replay_evidence(
    bundle: PathLike,
    suspect: PathLike,
    *,
    commitment: Commitment | PathLike | None = None,
    base: PathLike | None = None,
    progress: Progress | None = None,
) -> Replay:
    """Measure again what a bundle tells, on one's own copy of the suspect; nobody needs the key.

    Example:
        pathmark.replay_evidence("case-17", "./our-copy-of-the-suspect").words()
    """
    checked = check_evidence(bundle, commitment=commitment)
    if not checked.holds:
        raise ResultError(f"{os.fspath(bundle)} does not hold, so nothing is replayed: {checked.found.problems[0]}")
    read, name = checked.bundle, os.fspath(suspect)
    told = read.measured
    if told is None or read.suspect.kind != "model":
        recorded = "replies" if told is None else "routes"
        raise VerificationError(
            f"this bundle rests on {recorded} that were recorded; only a reading of weights can be replayed. "
            "`pathmark evidence check` computes its figures again"
        )
    marks = [mark for mark in told.watermarks if mark.reading == "as it is"]
    if not marks:
        raise VerificationError("this bundle opens no watermark; ask for one that was made with --reveal 0")
    again = [_again(read, mark, told, name, None if base is None else os.fspath(base), progress) for mark in marks]
    return Replay(name, _root_of(name) == read.suspect.root, tuple(again))


def suspect_root(suspect: PathLike) -> str:
    """The root of a model's files, to be noted on receipt."""
    return _root_of(os.fspath(suspect))


def _root_of(name: str) -> str:
    path = Path(name)
    if not path.exists():
        from pathmark.models.loading import local_folder

        path = local_folder(name)
    return model_root(model_files(path))


def _again(
    bundle: EvidenceBundle,
    mark: MeasuredWatermark,
    told: Measured,
    name: str,
    base: str | None,
    progress: Progress | None,
) -> ReplayedMark:
    """One watermark measured again, with the same texts and controls."""
    from pathmark.verification import disclose

    claimed = open_claim(dict(bundle.claim(mark.watermark)), parse_commitment(dict(bundle.document(COMMITMENT))))
    claimed = replace(claimed, watermarks=(claimed.watermarks[0].with_id(mark.id),))
    examined = _examined(bundle, claimed, told, name, base, progress)
    (new,) = disclose(examined, [(0, claimed.watermarks[0])], None).watermarks
    largest = max(
        abs(a - b)
        for one, other in zip(mark.layers, new.layers, strict=True)
        for shares, others in ((one.triggered, other.triggered), (one.clean, other.clean))
        for a, b in zip(shares, others, strict=True)
    )
    return ReplayedMark(mark.watermark, PValue(mark.exact.log10_p), PValue(new.exact.log10_p), largest)


def _examined(
    bundle: EvidenceBundle, key: ClaimedKey, told: Measured, name: str, base: str | None, progress: Progress | None
) -> Examined:
    from pathmark.models.devices import Placement
    from pathmark.verification import ExamineConfig, ReadWith, examine

    settings = bundle.run.settings
    streamed = settings["access"] == "streamed weights"
    config = ExamineConfig(
        align=bool(settings.get("align", True)), stream="always" if streamed else "never",
        placement=Placement(device="cpu", dtype="fp32"),
    )  # fmt: skip
    again = ReadWith(told.probes.tokens, told.probes.decoys)
    return examine(name, key, config, base=base, again=again, progress=progress)
