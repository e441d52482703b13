"""`pathmark.commit`: publish what a key claims, bind it to a release; and check either."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathmark.errors import KeyFileError
from pathmark.front_door.keys import KeyLike, open_key
from pathmark.keys import Commitment, check_claim, check_commitment, commit_key, commit_release, load_commitment
from pathmark.keys.commitment import load_public
from pathmark.keys.keyfile import PassphraseSource
from pathmark.keys.release import Progress as FileProgress
from pathmark.keys.release import release_files
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
            "Anchor it in time outside: a transparency log, a notary, a signed tag (docs/disputes.md)."
        )


def commit(
    key: KeyLike,
    output: str | os.PathLike[str] | None = None,
    *,
    release: str | os.PathLike[str] | None = None,
    passphrase: PassphraseSource = None,
    progress: Progress | None = None,
) -> Committed:
    """Commit to a key, and with `release` also to the sha256 of every released file.

    Example:
        pathmark.commit("owner.key", "release.commitment.json", release="./marked")
    """
    owner, file = open_key(key, passphrase), None if output is None else Path(output)
    if release is None:
        commitment = commit_key(owner)
    else:
        commitment = commit_release(owner, Path(release), progress=_megabytes(Path(release), progress))
    if file is not None:
        try:
            with file.open("x", encoding="ascii") as stream:
                stream.write(json.dumps(commitment.document(), indent=1) + "\n")
        except FileExistsError:
            raise KeyFileError(f"{file} already exists; choose another name, commitments are kept") from None
        except OSError as error:
            raise KeyFileError(f"cannot write {file}: {error.strerror}") from None
    return Committed(commitment, file)


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """What a commitment is held against; its signature is always checked."""

    key: KeyLike | None = None
    """The key it should belong to."""
    release: str | os.PathLike[str] | None = None
    """The folder whose files it should bind."""
    claim: str | os.PathLike[str] | None = None
    """A revealed watermark that it should contain."""


@dataclass(frozen=True)
class CheckedCommitment:
    """Whether a commitment holds."""

    commitment: Commitment
    problems: tuple[str, ...]
    compared: tuple[str, ...]
    """What it was held against."""

    @property
    def holds(self) -> bool:
        """Whether nothing differs."""
        return not self.problems

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark commit --check --json`."""
        return {"holds": self.holds, "problems": list(self.problems), **_summary(self.commitment)}

    def words(self) -> str:
        """Some lines for people."""
        made = self.commitment
        end = f"holds: {', '.join(self.compared)}" if self.holds else "does not hold"
        lines = [f"{made.kind} commitment of {made.fingerprint}", f"dated {made.created} by its owner"]
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
    told = [name for name in ("key", "release", "claim") if getattr(config, name) is not None]
    return CheckedCommitment(made, tuple(problems), ("signature", *told))


def _summary(commitment: Commitment) -> dict[str, Any]:
    return {
        "kind": commitment.kind,
        "owner": commitment.owner,
        "created": commitment.created,
        "fingerprint": commitment.fingerprint,
        "revision": commitment.revision,
        "root": commitment.root.hex(),
        "files": len(commitment.files),
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
