"""Does an evidence bundle hold? Checked without torch, without the key and without a network.

Three questions: is every byte as it was signed; are the opened watermarks those that were committed; do the figures
follow from what was recorded. A problem begins with the name of the file that it is in.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np
from cryptography.x509 import load_pem_x509_certificates

from pathmark.errors import PathmarkError
from pathmark.keys import Commitment, RevealedClaim, TriggerRef, check_claim, parse_commitment
from pathmark.keys.attestation import Attested, read_attestation
from pathmark.keys.modelroot import model_root
from pathmark.keys.release import ReleasedFile
from pathmark.keys.replyrule import max_starts, read_reply
from pathmark.keys.timestamps import Trusted, existed_by
from pathmark.results.evidence import (
    COMMITMENT,
    MEASURED,
    PREDICATE,
    ROOTS,
    RUN,
    STATEMENT,
    SUSPECT,
    TRANSCRIPT,
    VERDICT,
    EvidenceBundle,
    MeasuredWatermark,
    claim_name,
)
from pathmark.stats import Family, LayerEvidence, MarkTrial, PValue, bonferroni, exact_test, marks_p

SAME = 1e-9
"""Figures that differ by less are the same: it is room for another machine's last digit."""
T = TypeVar("T")


@dataclass(frozen=True)
class Recomputed:
    """The chance of one opened watermark, computed again from the record."""

    watermark: int
    p: PValue
    """By itself, charged for all watermarks that could have been opened in its place."""
    choices: int | None
    """How many those are; None where the commitment does not tell."""


@dataclass(frozen=True)
class CheckedEvidence:
    """What a check found."""

    problems: tuple[str, ...]
    """Empty if the bundle holds; each names its file."""
    limits: tuple[str, ...]
    """What this check could not tell, and why."""
    fingerprint: str | None
    """Key that signed it."""
    root: str | None
    """Root of the suspect's files."""
    existed_by: datetime.datetime | None
    """When the commitment was there at the latest, by an authority or a block that the reader trusts."""
    recomputed: tuple[Recomputed, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def listed(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Name, size and digest of every file, as the statement signs them."""
    return [{"name": n, "size": len(files[n]), "sha256": sha256(files[n]).hexdigest()} for n in sorted(files)]


def check_bundle(
    bundle: EvidenceBundle, published: Commitment | None = None, trusted: Sequence[Trusted] = ()
) -> CheckedEvidence:
    """Check everything that can be checked here. `published` is the commitment as its owner made it public."""
    check = _Check(bundle)
    signed = check.signed()
    if signed is None or check.problems:  # what was altered proves nothing, and need not be read
        return check.result(signed, (), None)
    commitment = check.commitment(signed, published)
    check.suspect(signed)
    claims = check.claims(commitment)
    recomputed = check.figures(claims)
    moment = None if commitment is None else existed_by(commitment, trusted)
    if commitment is not None and published is None:
        check.limits.append(f"{COMMITMENT} came with the bundle; compare it with what {signed.fingerprint} published")
    if moment is None:
        check.limits.append(
            "nobody whom you named vouches for the commitment's date (--timestamp-roots, --block-headers)"
        )
        check.stamped(commitment)
    return check.result(signed, recomputed, moment)


class _Check:
    """Collects what is wrong, file by file."""

    def __init__(self, bundle: EvidenceBundle) -> None:
        self.bundle = bundle
        self.problems: list[str] = []
        self.limits: list[str] = []

    def result(
        self, signed: Attested | None, recomputed: Sequence[Recomputed], moment: datetime.datetime | None
    ) -> CheckedEvidence:
        name, root = (None, None) if signed is None else (signed.fingerprint, signed.sha256)
        return CheckedEvidence(tuple(self.problems), tuple(self.limits), name, root, moment, tuple(recomputed))

    def signed(self) -> Attested | None:
        """The statement, if its signature holds; every other file is held against it."""
        files = self.bundle.files
        if STATEMENT not in files:
            self.problems.append(f"{STATEMENT}: missing; expected a bundle written with --evidence")
            return None
        signed = self._tried(STATEMENT, read_attestation, files[STATEMENT], PREDICATE)
        if signed is None:
            return None
        expected = self._tried(STATEMENT, lambda: {str(f["name"]): f["sha256"] for f in signed.predicate["files"]})
        if expected is None:
            return signed
        for name in sorted(expected.keys() | files.keys() - {STATEMENT}):
            if name not in files:
                self.problems.append(f"{name}: missing")
            elif name not in expected:
                self.problems.append(f"{name}: not part of what was signed")
            elif sha256(files[name]).hexdigest() != expected[name]:
                self.problems.append(f"{name}: changed after it was signed")
        return signed

    def commitment(self, signed: Attested, published: Commitment | None) -> Commitment | None:
        """The commitment inside, if it is the signer's and the one that was published."""
        inside = self._tried(COMMITMENT, lambda: parse_commitment(dict(self.bundle.document(COMMITMENT))))
        if inside is None:
            return None
        if inside.public_key != signed.public_key:
            self.problems.append(f"{COMMITMENT}: made by {inside.fingerprint}, the bundle by {signed.fingerprint}")
        if published is not None and published.statement != inside.statement:
            self.problems.append(f"{COMMITMENT}: another one than the published commitment that you gave")
        if inside.limits:
            self.limits += [f"{COMMITMENT}: {limit}" for limit in inside.limits]
        return inside

    def stamped(self, commitment: Commitment | None) -> None:
        """What those say of its date whom the bundle's maker trusts; readers choose for themselves."""
        if commitment is None or ROOTS not in self.bundle.files:
            return
        roots = self._tried(ROOTS, load_pem_x509_certificates, self.bundle.files[ROOTS])
        if roots and (moment := existed_by(commitment, roots)) is not None:
            said = f"{moment:%Y-%m-%d %H:%M} UTC"
            self.limits.append(f"{ROOTS}: by authorities of the maker's choice it existed on {said}")

    def suspect(self, signed: Attested) -> None:
        """The root follows from the files, and is what was signed."""
        suspect = self._tried(SUSPECT, lambda: self.bundle.suspect)
        if suspect is None:
            return
        files = [ReleasedFile(f.path, f.size, f.sha256) for f in suspect.files]
        if (self._tried(SUSPECT, model_root, files), suspect.root) != (suspect.root, signed.sha256):
            self.problems.append(f"{SUSPECT}: its files do not give the root that was signed")
        if wrong := [step.who for step in suspect.custody if step.root not in (None, suspect.root)]:
            self.problems.append(f"{SUSPECT}: {wrong[0]} received other files than were examined")

    def claims(self, commitment: Commitment | None) -> dict[int, RevealedClaim]:
        """The opened watermarks whose proofs hold."""
        run = self._tried(RUN, lambda: self.bundle.run)
        found: dict[int, RevealedClaim] = {}
        if run is None or commitment is None:
            return found
        if not run.revealed:
            self.limits.append("no watermark is opened, so nobody can compute or replay the figures without the key")
        for j in run.revealed:
            claim = self._tried(claim_name(j), self._claim, j, commitment)
            if claim is not None:
                found[j] = claim
        return found

    def _claim(self, watermark: int, commitment: Commitment) -> RevealedClaim:
        return check_claim(dict(self.bundle.claim(watermark)), commitment)

    def figures(self, claims: Mapping[int, RevealedClaim]) -> list[Recomputed]:
        """The chance of what was recorded, computed again."""
        if MEASURED in self.bundle.files:
            measured = self._tried(MEASURED, lambda: self.bundle.measured)
            again = []
            for mark in () if measured is None else measured.watermarks:
                tested = self._tried(MEASURED, self._exact, mark, claims.get(mark.watermark))
                if tested is not None and mark.reading == "as it is":
                    again.append(tested)
        else:
            again = self._tried(TRANSCRIPT, self._replies, claims) or []
        self._verdict(claims, again)
        return again

    def _exact(self, mark: MeasuredWatermark, claim: RevealedClaim | None) -> Recomputed | None:
        if claim is None:
            self.problems.append(f"{MEASURED}: watermark {mark.watermark} is not opened by a claim that holds")
            return None
        watermark = claim.watermark.with_id(mark.id)
        layers = []
        for row in mark.layers:
            if (row.pool, row.targets) != (watermark.pool(row.layer), watermark.targets(row.layer)):
                self.problems.append(f"{MEASURED}: layer {row.layer} has other experts than were committed")
                return None
            diff_E, matched_E = np.asarray(row.difference, dtype=np.float64), np.asarray(row.matched, dtype=bool)
            layers.append(LayerEvidence(row.layer, diff_E, row.pool, row.targets, matched_E))
        if tuple(row.layer for row in mark.layers) != watermark.layers:
            self.problems.append(f"{MEASURED}: watermark {mark.watermark} has other layers than were committed")
            return None
        tested, told = exact_test(layers), mark.exact
        figures = [
            (tested.statistic, told.statistic), (tested.p.log10, told.log10_p), (tested.floor.log10, told.log10_floor)
        ]  # fmt: skip
        if not all(math.isclose(new, old, rel_tol=SAME, abs_tol=SAME) for new, old in figures):
            self.problems.append(f"{MEASURED}: the figures of watermark {mark.watermark} do not follow from its layers")
        return _charged(mark.watermark, tested.p, claim)

    def _replies(self, claims: Mapping[int, RevealedClaim]) -> list[Recomputed]:
        """Marks in replies, read again by the rule; only what was said behind opened triggers."""
        lines = self.bundle.transcript
        if not lines:
            return []
        limit = int(lines[0].get("max_tokens", 0))
        marks = {
            TriggerRef(j, n): trigger.mark
            for j, claim in claims.items()
            for n, trigger in enumerate(claim.watermark.triggers)
        }
        rows: dict[TriggerRef, list[tuple[str, bool]]] = {TriggerRef(*ref): [] for ref in lines[0]["triggers"]}
        for line in lines[1:]:
            if line.get("trigger") is None or "reply" not in line or TriggerRef(*line["trigger"]) not in marks:
                continue
            ref = TriggerRef(*line["trigger"])
            seen = read_reply(line["reply"], line["prompt"], marks, limit).marks
            if [list(mark) for mark in seen] != [m for m in line["marks"] if TriggerRef(*m) in marks]:
                self.problems.append(f"{TRANSCRIPT}: reply {line['number']} holds other marks than it says")
            rows[ref].append((line["reply"], seen == (ref,)))
        found = []
        for j, claim in claims.items():
            trials = [
                MarkTrial(
                    bits=bits, max_starts=max_starts(marks[ref], limit),
                    trials=len({reply for reply, _ in said}), seen=any(hit for _, hit in said),
                )
                for ref, said in rows.items()
                if said and ref.watermark == j and (bits := claim.watermark.triggers[ref.number].mark_bits) is not None
            ]  # fmt: skip
            if trials:
                found.append(_charged(j, marks_p(trials), claim))
        return found

    def _verdict(self, claims: Mapping[int, RevealedClaim], again: Sequence[Recomputed]) -> None:
        """Where the key has one watermark, the verdict's own figure is computed again too."""
        verdict = self._tried(VERDICT, lambda: self.bundle.verdict)
        if verdict is None or len(again) != 1 or again[0].choices != 1:
            return
        if "verdict" not in verdict or verdict.get("grafted") or verdict.get("log10_p") is None:
            return
        family = self._tried(VERDICT, lambda: Family(**verdict["family"]))
        if family is None:
            return
        expected = bonferroni(again[0].p, family).log10
        if not math.isclose(expected, verdict["log10_p"], rel_tol=SAME, abs_tol=SAME):
            self.problems.append(f"{VERDICT}: its p-value does not follow from what was recorded")

    def _tried(self, name: str, read: Callable[..., T], *arguments: object) -> T | None:
        """What a reader gives; where it refuses, a problem of that file."""
        try:
            return read(*arguments)
        except PathmarkError as error:
            said = str(error)
            self.problems.append(said if said.startswith(name) else f"{name}: {said}")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            self.problems.append(f"{name}: it is damaged, or not what its name says")
        return None


def _charged(watermark: int, p: PValue, claim: RevealedClaim) -> Recomputed:
    return Recomputed(watermark, p.charged(math.log10(claim.choices or 1)), claim.choices)
