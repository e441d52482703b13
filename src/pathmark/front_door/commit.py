"""`pathmark.commit`: publish what a key claims, bind it to a release; and check either."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathmark.errors import KeyFileError
from pathmark.front_door.keys import KeyLike, open_key
from pathmark.keys import (
    Commitment,
    check_claim,
    check_commitment,
    commit_key,
    commit_release,
    load_commitment,
    write_commitment,
)
from pathmark.keys.commitment import load_public
from pathmark.keys.keyfile import PassphraseSource
from pathmark.keys.release import Progress as FileProgress
from pathmark.keys.release import release_files
from pathmark.keys.safefile import write_whole
from pathmark.keys.timestamps import existed_by, load_answer, load_trusted, stamp, timestamp_request
from pathmark.progress import Progress


@dataclass(frozen=True)
class Committed:
    """A signed commitment that is safe to publish."""

    commitment: Commitment
    file: Path | None

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark commit --json`."""
        return {"file": None if self.file is None else str(self.file), **_summary(self.commitment)}

    def words(self) -> str:
        """Some sentences for people."""
        made, name = self.commitment, "" if self.file is None else f"{self.file}: "
        bound = f"\nbinds {len(made.files)} files, {sum(f.size for f in made.files):,} bytes" if made.files else ""
        return (
            f"{name}{made.kind} commitment of {made.fingerprint}, revision {made.revision}{bound}\n"
            "Its date is only what you say: have it stamped by an authority (--timestamp-request, then --stamp)."
        )


def commit(
    key: KeyLike,
    output: str | os.PathLike[str] | None = None,
    *,
    release: str | os.PathLike[str] | None = None,
    request: str | os.PathLike[str] | None = None,
    statement: str | os.PathLike[str] | None = None,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
) -> Committed:
    """Commit to a key, and with `release` also to the sha256 of every released file.

    `request`: a file to write, which asks a time-stamping authority (RFC 3161) to vouch for the date; `statement`: a
    file to write, which `ots stamp` (OpenTimestamps) dates.

    Example:
        pathmark.commit("owner.key", "release.commitment.json", release="./marked")
    """
    owner, file = open_key(key, passphrase), None if output is None else Path(output)
    if release is None:
        commitment = commit_key(owner)
    else:
        commitment = commit_release(owner, Path(release), progress=_megabytes(Path(release), progress))
    if request is not None:
        write_whole(Path(request), timestamp_request(commitment))
    if statement is not None:
        write_whole(Path(statement), commitment.statement)
    if file is not None:
        write_commitment(commitment, file)
    return Committed(commitment, file)


def stamp_commitment(commitment: str | os.PathLike[str], answer: str | os.PathLike[str]) -> Committed:
    """Attach an authority's answer or an OpenTimestamps proof to a commitment file, if it is over that commitment."""
    file = Path(commitment)
    stamped = stamp(load_commitment(file), load_answer(Path(answer)))
    write_commitment(stamped, file, replacing=True)
    return Committed(stamped, file)


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """What a commitment is held against; its signature is always checked."""

    key: KeyLike | None = None
    """The key it should belong to."""
    release: str | os.PathLike[str] | None = None
    """The folder whose files it should bind."""
    claim: str | os.PathLike[str] | None = None
    """A revealed watermark that it should contain."""
    timestamp_roots: str | os.PathLike[str] | None = None
    """PEM file with the root certificates of the time-stamping authorities that the reader trusts."""
    block_headers: str | os.PathLike[str] | None = None
    """File with the headers of Bitcoin blocks that OpenTimestamps proofs lead to, from where the reader trusts."""


@dataclass(frozen=True)
class CheckedCommitment:
    """Whether a commitment holds."""

    commitment: Commitment
    problems: tuple[str, ...]
    compared: tuple[str, ...]
    """What it was held against."""
    existed_by: datetime.datetime | None
    """The earliest moment that a trusted authority vouches for."""

    @property
    def holds(self) -> bool:
        """Whether nothing differs."""
        return not self.problems

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark commit --check --json`."""
        moment = None if self.existed_by is None else self.existed_by.isoformat()
        return {"holds": self.holds, "problems": list(self.problems), "existed_by": moment, **_summary(self.commitment)}

    def words(self) -> str:
        """Some lines for people."""
        made = self.commitment
        end = f"holds: {', '.join(self.compared)}" if self.holds else "does not hold"
        dated = f"dated {made.created} by its owner, which counts for nobody else"
        if self.existed_by is not None:
            dated = f"existed no later than {self.existed_by:%Y-%m-%d %H:%M} UTC, by somebody whom you trust"
        lines = [f"{made.kind} commitment of {made.fingerprint}", dated, *made.limits]
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems), end])


def check(
    commitment: str | os.PathLike[str],
    config: CheckConfig | None = None,
    *,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
) -> CheckedCommitment:
    """Hold a commitment against its signature, a key, a release and a claim."""
    config = config or CheckConfig()
    made = load_commitment(os.fspath(commitment))
    key = None if config.key is None else open_key(config.key, passphrase)
    release = None if config.release is None else Path(config.release)
    problems = check_commitment(made, key, release, progress=_megabytes(release, progress))
    if config.claim is not None:
        try:
            check_claim(load_public(Path(config.claim), "claim"), made)
        except KeyFileError as error:
            problems.append(str(error))
    trusted = load_trusted(config.timestamp_roots, config.block_headers)
    told = [name for name in ("key", "release", "claim") if getattr(config, name) is not None]
    return CheckedCommitment(made, tuple(problems), ("signature", *told), existed_by(made, trusted))


def _summary(commitment: Commitment) -> dict[str, Any]:
    return {
        "kind": commitment.kind,
        "owner": commitment.owner,
        "created": commitment.created,
        "fingerprint": commitment.fingerprint,
        "revision": commitment.revision,
        "root": commitment.root.hex(),
        "files": len(commitment.files),
        "version": commitment.version,
        "timestamps": len(commitment.timestamps),
    }


def _megabytes(folder: Path | None, progress: Progress | None) -> FileProgress | None:
    """Hashed bytes as units of a megabyte."""
    if folder is None or progress is None:
        return None
    progress.stage("sha256, MB", sum(path.stat().st_size for path in release_files(folder)) // 1_000_000)
    seen = 0

    def report(name: str, size: int) -> None:
        nonlocal seen
        before, seen = seen, seen + size
        progress.advance(seen // 1_000_000 - before // 1_000_000, name)

    return report
