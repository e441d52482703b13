"""An evidence bundle: a folder, or a zip of it, that somebody without the key can read, check and replay.

`EvidenceBundle.load` reads one; `evidence_check` says whether it holds. Every file is named in the signed statement.
What is secret in a key is here only for the watermarks that the owner chose to open (`Run.revealed`).

Shape of per-expert tuples: one entry for each of the owner's experts of the layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pathmark.errors import ResultError
from pathmark.results.bundlefile import read_bundle
from pathmark.results.schema import from_json, to_json

VERSION: Final = 1
VERDICT, RUN, SUSPECT, MEASURED = "verdict.json", "run.json", "suspect.json", "measured.json"
COMMITMENT, ROOTS, BLOCKS = "commitment.json", "timestamp-roots.pem", "block-headers.txt"
TRANSCRIPT: Final = "transcript.jsonl"
STATEMENT, WORDS, REVEALED = "statement.dsse.json", "VERDICT.md", "REVEALED.md"
ATTACHMENTS: Final = "attachments/"
PREDICATE: Final = "https://pathmark/evidence/v1"
"""Type of the signed statement."""
Reading = Literal["as it is", "behind the original"]


@dataclass(frozen=True, kw_only=True)
class MeasuredLayer:
    """One marked layer: what the trigger does to every expert."""

    layer: int
    """Number of the layer in the owner's model."""
    pool: tuple[int, ...]
    """Experts that could have been targets."""
    targets: tuple[int, ...]
    """The experts that the key names."""
    triggered: tuple[float, ...]
    """Per expert: mean routing mass behind the trigger; where only decisions are known, share of tokens sent there."""
    clean: tuple[float, ...]
    """The same on the same texts without trigger."""
    difference: tuple[float, ...]
    """Per expert: what the exact test was given; whole numbers where choices were counted."""
    matched: tuple[bool, ...]
    """Per expert: whether the suspect has a counterpart of it."""


@dataclass(frozen=True, kw_only=True)
class NullCurve:
    """The distribution of the statistic over all paths the key could have had, as a falling curve."""

    statistics: tuple[float, ...]
    """Rising, from the middle of the distribution to the largest value any path can reach."""
    log10_p: tuple[float, ...]
    """At each: decimal logarithm of the share of paths that reach it."""


@dataclass(frozen=True, kw_only=True)
class ExactFigures:
    """The exact test of one watermark by itself, before anything is charged."""

    statistic: float
    log10_p: float
    log10_floor: float
    """The smallest that this watermark can reach here."""
    n_paths: str
    """Paths that the key could have had, as decimal digits."""
    erased_layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PathToken:
    """One text token on its way: per marked layer the experts it was sent to."""

    token: int
    text: str | None
    """As the owner's tokenizer writes it; None where it was not at hand."""
    triggered: tuple[tuple[int, ...], ...]
    """Layer by layer, behind the trigger; -1 for an expert that the owner's model does not have."""
    clean: tuple[tuple[int, ...], ...]
    """The same without trigger."""


@dataclass(frozen=True, kw_only=True)
class Barcodes:
    """Group index per layer: what the barcode of a path shows."""

    expected: tuple[int, ...]
    """As the key says."""
    recovered: tuple[int | None, ...]
    """As the routing says, read blindly; None for a layer that did not speak clearly."""


@dataclass(frozen=True, kw_only=True)
class MeasuredWatermark:
    """Everything that one opened watermark showed in one reading of the suspect."""

    watermark: int
    """Its number in the key."""
    id: int
    """The id whose path was tested."""
    reading: Reading
    masses_known: bool
    """Whether routing masses were read, or only which experts were chosen."""
    layers: tuple[MeasuredLayer, ...]
    exact: ExactFigures
    null: NullCurve
    probe: tuple[PathToken, ...]
    """The first probe text, token by token."""
    barcodes: Barcodes
    decoys: tuple[float, ...]
    """log10 p of this path behind each decoy trigger."""


@dataclass(frozen=True, kw_only=True)
class SuspectFile:
    """One file of the suspect."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CustodyStep:
    """Somebody had the suspect: who, since when, how it was obtained, and what its files were on receipt."""

    who: str
    when: str
    how: str
    root: str | None
    """Root on receipt; None where nobody computed it."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """What was examined, file by file."""

    name: str
    kind: Literal["model", "routes", "replies"]
    root: str
    """sha256 as OpenSSF model signing computes it over a folder: the subject of the signed statement."""
    serialization: Mapping[str, Any]
    """How the root was computed, in that format's words."""
    files: tuple[SuspectFile, ...]
    custody: tuple[CustodyStep, ...]


@dataclass(frozen=True, kw_only=True)
class Probes:
    """What the suspect was given to read."""

    tokens: tuple[tuple[int, ...], ...]
    """Token ids of each probe text."""
    texts: tuple[str, ...] | None
    """The same in words; None where the owner's tokenizer was not at hand."""
    decoys: tuple[tuple[int, ...], ...]
    """Control triggers: nobody's, so nothing is given away."""
    decoy_probes: int
    """On how many of the texts the controls were tried."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """How the verdict came about."""

    version: int
    """Of this layout."""
    created: str
    command: tuple[str, ...]
    """As typed; secrets are never options."""
    versions: Mapping[str, str]
    platform: Mapping[str, str]
    seeds: Mapping[str, int]
    settings: Mapping[str, Any]
    fingerprint: str
    """Public name of the key."""
    revealed: tuple[int, ...]
    """Watermarks that the bundle opens."""
    watermarks: int
    """How many the key has."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Where routing was read: the texts, and every opened watermark in every reading."""

    probes: Probes
    watermarks: tuple[MeasuredWatermark, ...]


T = TypeVar("T")


@dataclass(frozen=True)
class EvidenceBundle:
    """A bundle as read; nothing in it has been checked yet."""

    files: Mapping[str, bytes]
    """Name -> content."""

    @classmethod
    def load(cls, path: Path) -> EvidenceBundle:
        """Read a folder or a zip."""
        return cls(read_bundle(path))

    @property
    def verdict(self) -> Mapping[str, Any]:
        """What `--json` printed: of `verify`, `verify-api` and `verify-routes`, or of `trace`."""
        return self.document(VERDICT)

    @property
    def words(self) -> str:
        """The verdict for people (Markdown)."""
        return self._bytes(WORDS).decode("utf-8")

    @property
    def run(self) -> Run:
        """How the verdict came about."""
        return self._typed(Run, RUN)

    @property
    def suspect(self) -> Suspect:
        """What was examined."""
        return self._typed(Suspect, SUSPECT)

    @property
    def measured(self) -> Measured | None:
        """Routing, where it was read; None for replies."""
        return self._typed(Measured, MEASURED) if MEASURED in self.files else None

    @property
    def transcript(self) -> tuple[Mapping[str, Any], ...]:
        """Exchanges with an API, one object each, the settings first; empty where routing was read."""
        lines = self.files.get(TRANSCRIPT, b"").splitlines()
        return tuple(self._parsed(line, TRANSCRIPT) for line in lines)

    def claim(self, watermark: int) -> Mapping[str, Any]:
        """The opening of a watermark against the commitment."""
        return self.document(claim_name(watermark))

    def barcode(self, watermark: int, kind: Literal["expected", "recovered"]) -> str | None:
        """An SVG; None where a layer did not speak, so that there is no whole path to draw."""
        name = barcode_name(watermark, kind)
        return self.files[name].decode("utf-8") if name in self.files else None

    def _bytes(self, name: str) -> bytes:
        if name not in self.files:
            raise ResultError(f"{name} is missing; expected an evidence bundle written with --evidence")
        return self.files[name]

    def document(self, name: str) -> Mapping[str, Any]:
        """The JSON object in a file."""
        return self._parsed(self._bytes(name), name)

    def _parsed(self, data: bytes, name: str) -> Mapping[str, Any]:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ResultError(f"{name} holds no JSON object; expected a file of an evidence bundle")
        return found

    def _typed(self, kind: type[T], name: str) -> T:
        try:
            return from_json(kind, self.document(name))
        except ResultError as error:
            raise ResultError(f"{name} is damaged: {error}") from error


def claim_name(watermark: int) -> str:
    """File of a watermark's opening."""
    return f"claim-{watermark}.json"


def barcode_name(watermark: int, kind: str) -> str:
    """File of a watermark's barcode."""
    return f"barcode-{watermark}-{kind}.svg"


def as_json(value: Any) -> bytes:
    """The file of a typed part, or of any JSON value."""
    return (json.dumps(to_json(value), indent=1, ensure_ascii=False) + "\n").encode("utf-8")
