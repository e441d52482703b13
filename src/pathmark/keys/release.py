"""The files of a released folder and their digests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pathmark.errors import KeyFileError
from pathmark.keys.digests import file_digest

Progress = Callable[[str, int], None]
"""Called with a file's name and the bytes of it just read."""

IGNORED = frozenset({".git", ".cache"})
"""Folders at the top that download and version control tools add; they are not part of a release."""


@dataclass(frozen=True)
class ReleasedFile:
    """One file of a release."""

    path: str
    """Relative, with forward slashes."""
    size: int
    sha256: str


def release_files(folder: Path) -> list[Path]:
    """Every file below the folder, sorted by relative path; links to files count as files."""
    if not folder.is_dir():
        raise KeyFileError(f"{folder} is not a folder; expected the released model")
    found = []
    for base, folders, names in os.walk(folder):
        here = Path(base)
        if here == folder:
            folders[:] = [name for name in folders if name not in IGNORED]
        for name in folders:
            if (here / name).is_symlink():
                raise KeyFileError(f"{here / name} is a link to a folder; release a folder without such links")
        found += [here / name for name in names]
    if not found:
        raise KeyFileError(f"{folder} has no files; expected the released model")
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def hash_release(folder: Path, progress: Progress | None = None) -> Iterator[ReleasedFile]:
    """Digest of every file of the folder."""
    for path in release_files(folder):
        name = path.relative_to(folder).as_posix()
        try:
            found = ReleasedFile(name, path.stat().st_size, file_digest(path, progress and partial(progress, name)))
        except OSError as error:
            raise KeyFileError(f"cannot read {path}: {error.strerror}") from None
        yield found


def compare_release(expected: Iterable[ReleasedFile], folder: Path, progress: Progress | None = None) -> list[str]:
    """Changed, missing and additional files, in words; empty if the folder is the released one."""
    committed = {file.path: file for file in expected}
    present = {file.path: file for file in hash_release(folder, progress)}
    problems = [f"{name}: missing" for name in committed if name not in present]
    problems += [f"{name}: not in the commitment" for name in present if name not in committed]
    for name, file in committed.items():
        there = present.get(name)
        if there is not None and there.sha256 != file.sha256:
            problems.append(f"{name}: changed (sha256 {file.sha256[:12]}... expected, {there.sha256[:12]}... found)")
    return sorted(problems)
