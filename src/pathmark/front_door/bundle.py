"""Evidence for somebody else: everything that a verdict rests on, in one signed folder or zip (docs/evidence.md)."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from pathmark.errors import ModelError, VerificationError
from pathmark.front_door.criteria import JudgeConfig
from pathmark.front_door.custody import custody_steps
from pathmark.keys import Commitment, OwnerKey, VerifierKey, Watermark, commit_key, reveal_watermark
from pathmark.keys.attestation import attest
from pathmark.keys.key import utc_now
from pathmark.keys.modelroot import model_files, model_root, serialization
from pathmark.keys.release import ReleasedFile
from pathmark.models import load_tokenizer
from pathmark.models.loading import local_folder
from pathmark.models.tokenization import HFTextCodec
from pathmark.reporting.barcode import render_svg
from pathmark.results.bundlefile import is_zip, write_bundle
from pathmark.results.evidence import (
    BLOCKS,
    COMMITMENT,
    MEASURED,
    PREDICATE,
    REVEALED,
    ROOTS,
    RUN,
    STATEMENT,
    SUSPECT,
    TRANSCRIPT,
    VERDICT,
    VERSION,
    WORDS,
    Measured,
    Run,
    Suspect,
    SuspectFile,
    as_json,
    barcode_name,
    claim_name,
)
from pathmark.results.evidence_check import listed
from pathmark.verdicts.wording import Wording
from pathmark.verification import Examined, disclose

LIBRARIES: Final = ("pathmark", "torch", "transformers", "tokenizers", "safetensors", "numpy", "cryptography")


@dataclass(frozen=True, kw_only=True)
class EvidenceConfig:
    """What goes into a bundle beside the evidence."""

    reveal: tuple[int, ...] = (0,)
    """Watermarks to open. Whoever reads the bundle then knows their triggers and experts; the others stay secret."""
    custody: str | os.PathLike[str] | None = None
    """TOML file that says who had the suspect since when (docs/evidence.md)."""
    obtained: str = "not stated"
    """How the suspect was obtained, where there is no such file."""
    command: tuple[str, ...] = ()
    """The command line, to be told."""
    zip: bool = False
    """One file instead of a folder; also where the name ends so."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A finished verification or trace, with what its evidence is made of."""

    suspect: str
    access: str
    key: VerifierKey
    wording: Wording
    summary: Mapping[str, Any]
    examined: Examined | None = None
    transcript: bytes | None = None
    """The log of exchanges with an API."""
    judged: JudgeConfig | None = None
    id: int | None = None
    """Of the licensee that was named; None for the key's own."""
    settings: Mapping[str, Any] = field(default_factory=dict)


def write_evidence(case: Case, path: str | os.PathLike[str], config: EvidenceConfig | None = None) -> Path:
    """Write the bundle, signed with the owner's key; returns where it is."""
    config, target = config or EvidenceConfig(), Path(path)
    if config.zip and not is_zip(target):
        target = target.with_name(f"{target.name}.zip")
    key = case.key
    if not isinstance(key, OwnerKey):
        raise VerificationError("an evidence bundle is signed with the owner's key; expected --key, got a claim")
    if wrong := [j for j in config.reveal if not 0 <= j < len(key.watermarks)]:
        raise VerificationError(f"watermark {wrong[0]} does not exist; this key has {len(key.watermarks)}")
    files = _opened(case, key, config.reveal)
    if case.transcript is not None:
        files[TRANSCRIPT] = _told(case.transcript, key, config.reveal)
    suspect = _suspect(case, config, files.get(TRANSCRIPT))
    files[SUSPECT] = as_json(suspect)
    files[VERDICT] = as_json(_shown(case.summary, config.reveal))
    files[RUN] = as_json(_run(case, key, config))
    files[WORDS] = _page(case, key).encode()
    files[REVEALED] = _revealed(key, config.reveal, files).encode()
    predicate = {"version": VERSION, "files": listed(files)}
    files[STATEMENT] = attest(key, PREDICATE, suspect.name, suspect.root, predicate)
    write_bundle(target, files)
    return target


def _opened(case: Case, key: OwnerKey, reveal: tuple[int, ...]) -> dict[str, bytes]:
    """Commitment, claims, and what the opened watermarks showed."""
    commitment = _commitment(case, key)
    files = {COMMITMENT: as_json(commitment.document())}
    trusted = (None, None) if case.judged is None else (case.judged.timestamp_roots, case.judged.block_headers)
    files |= {name: Path(file).read_bytes() for name, file in zip((ROOTS, BLOCKS), trusted, strict=True) if file}
    for j in reveal:
        claim = reveal_watermark(key, j, revision=commitment.revision, version=commitment.version)
        files[claim_name(j)] = as_json(claim)
    if case.examined is None:
        return files
    # licensees' ids are those of the first watermark
    opened = [(j, _tested(key.watermarks[j], case.id if j == 0 else None)) for j in sorted(set(reveal))]
    measured = disclose(case.examined, opened, _decoder(case, key))
    files[MEASURED] = as_json(measured)
    return files | _barcodes(measured)


def _tested(watermark: Watermark, number: int | None) -> Watermark:
    return watermark if number is None else watermark.with_id(number)


def _commitment(case: Case, key: OwnerKey) -> Commitment:
    """The one that was given; else one of the key as it is, which nobody has dated."""
    given = None if case.judged is None else case.judged.loaded()
    return commit_key(key) if given is None else given


def _decoder(case: Case, key: OwnerKey) -> Any:
    """The owner's tokenizer, where the suspect still has it."""
    try:
        codec = HFTextCodec(load_tokenizer(case.settings.get("base") or case.suspect))
    except ModelError:
        return None
    return codec.decode if codec.digest == key.model.tokenizer_digest else None


def _barcodes(measured: Measured) -> dict[str, bytes]:
    found = {}
    for mark in measured.watermarks:
        if mark.reading != "as it is":
            continue
        found[barcode_name(mark.watermark, "expected")] = render_svg(mark.barcodes.expected)
        if None not in mark.barcodes.recovered:
            path = [index for index in mark.barcodes.recovered if index is not None]
            found[barcode_name(mark.watermark, "recovered")] = render_svg(path)
    return found


def _suspect(case: Case, config: EvidenceConfig, transcript: bytes | None) -> Suspect:
    place = Path(case.suspect)
    if case.access == "routes":
        kind, found, how = "routes", model_files(place), serialization(place)
    elif transcript is not None and "://" in case.suspect:
        digest = listed({TRANSCRIPT: transcript})[0]["sha256"]
        kind, found, how = (
            "replies",
            [ReleasedFile(TRANSCRIPT, len(transcript), digest)],
            serialization(Path(TRANSCRIPT)),
        )
    else:
        folder = place if place.is_dir() else local_folder(case.suspect)
        kind, found, how = "model", model_files(folder), serialization(folder)
    root = model_root(found)
    return Suspect(
        name=case.suspect,
        kind=kind,  # type: ignore[arg-type]
        root=root,
        serialization=how,
        files=tuple(SuspectFile(path=f.path, size=f.size, sha256=f.sha256) for f in found),
        custody=custody_steps(config.custody, config.obtained, root),
    )


def _shown(summary: Mapping[str, Any], reveal: tuple[int, ...]) -> dict[str, Any]:
    """The verdict without the rows of watermarks that stay secret: they tell which layers those use."""
    found = dict(summary)
    if "layers" in found:
        found["layers"] = [row for row in found["layers"] if row["watermark"] in reveal]
    return found


def _run(case: Case, key: OwnerKey, config: EvidenceConfig) -> Run:
    published = None if case.judged is None else case.judged.published
    return Run(
        version=VERSION,
        created=utc_now(),
        command=config.command,
        versions={name: version(name) for name in LIBRARIES} | {"python": platform.python_version()},
        platform={"system": platform.platform(), "machine": platform.machine(), "processors": str(os.cpu_count())},
        seeds={"decoys": key.derive_seed("decoys")},
        settings={
            "access": case.access,
            "suspect_published": None if published is None else published.isoformat(),
            **json.loads(json.dumps(case.settings, default=str)),
        },
        fingerprint=key.fingerprint,
        revealed=tuple(sorted(set(config.reveal))),
        watermarks=len(key.watermarks),
    )


def _told(log: bytes, key: OwnerKey, reveal: tuple[int, ...]) -> bytes:
    """The log; of exchanges that show anything of a watermark that stays secret, only the keyed digests."""
    hidden = [
        text
        for watermark in key.watermarks
        if watermark.index not in reveal
        for trigger in watermark.triggers
        for text in (trigger.text.strip(), trigger.mark.text.strip())
    ]
    lines = []
    for line in log.splitlines():
        entry = json.loads(line)
        texts = [str(entry.get(name) or "") for name in ("system", "prompt", "reply")]
        if any(secret in text for secret in hidden for text in texts):
            entry = {name: entry[name] for name in entry if name not in ("system", "prompt", "reply", "routes")}
        lines.append(json.dumps(entry))
    return ("\n".join(lines) + "\n").encode()


def _page(case: Case, key: OwnerKey) -> str:
    return f"""{case.wording.markdown()}
## How to check this

Nobody needs the key for it. With PathMark installed:

    pathmark evidence check THIS --commitment THE-PUBLISHED-COMMITMENT
    pathmark evidence replay THIS --suspect YOUR-OWN-COPY-OF-THE-SUSPECT

The first says whether any byte was changed and whether the figures follow from what was recorded; the second measures
again. The suspect is {case.suspect}; the key that signed is {key.fingerprint}. `{REVEALED}` lists what this bundle
gives away.
"""


def _revealed(key: OwnerKey, reveal: tuple[int, ...], files: Mapping[str, bytes]) -> str:
    """What a reader of the bundle learns, and what not."""
    opened = sorted(set(reveal))
    kept = [str(w.index) for w in key.watermarks if w.index not in opened]
    shown = [
        f"watermark {j}: its triggers, reply marks, layers, pools, target experts and id (`{claim_name(j)}`)"
        for j in opened
    ] or ["no watermark: nobody can compute or replay the figures without the key"]
    if opened and kept:
        shown.append(
            "in layers that several watermarks share, which experts belong to the opened one and which may not"
        )
    if opened and key.attachments:
        shown.append("profiles and sketches of the original's experts (in the claim), and so which layers are marked")
    if MEASURED in files:
        shown.append(f"the probe texts, and what the opened watermarks showed on them (`{MEASURED}`)")
    if TRANSCRIPT in files:
        shown.append(f"what was asked and answered, as far as it shows no other watermark (`{TRANSCRIPT}`)")
    shown += [
        f"the verdict, with the names of licensees where one was looked for (`{VERDICT}`)",
        f"names and digests of the suspect's files (`{SUSPECT}`); the command, versions and machine (`{RUN}`)",
        f"how many watermarks the key has: {len(key.watermarks)}; its owner's name and public key (`{COMMITMENT}`)",
    ]
    secret = ["the key's secret and its passphrase"]
    if kept:
        secret.append(f"watermarks {', '.join(kept)}: triggers, reply marks, target experts and what they showed")
    lists = {"Revealed": shown, "Still secret": secret}
    parts = [f"## {heading}\n\n" + "\n".join(f"- {line}" for line in lines) for heading, lines in lists.items()]
    closing = "An opened watermark is spent: whoever knows it can train it away. Give this only to those who judge."
    return "\n\n".join(["# What this bundle gives away", *parts, closing]) + "\n"


def settings_of(examine: Any, **more: Any) -> dict[str, Any]:
    """How a suspect was looked at, as JSON values."""
    return {**({} if examine is None else asdict(examine)), **{k: v for k, v in more.items() if v is not None}}
