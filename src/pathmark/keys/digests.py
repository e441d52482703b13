"""sha256 of files; one that was read already, under whatever name, is not read again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

_CHUNK = 1 << 22
_SETTLED_NS = 2_000_000_000
"""Clocks of file systems are coarse: a file that changed a moment ago may change again within the same tick."""
_known: dict[tuple[int, int, int, int, int], str] = {}
"""Of files as they were seen in this process: device, inode, size, times of contents and inode."""


def file_digest(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """sha256 of a file's bytes, as hex; `progress` is told how many are done."""
    with path.open("rb") as stream:
        before = _identity(os.fstat(stream.fileno()))
        if before in _known:
            if progress is not None:
                progress(before[2])
            return _known[before]
        digest = sha256()
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))
        after = _identity(os.fstat(stream.fileno()))
    if before == after and time.time_ns() - max(after[3:]) > _SETTLED_NS:
        _known[after] = digest.hexdigest()
    return digest.hexdigest()


def same_bytes(source: Path, target: Path, make: Callable[[Path, Path], object]) -> None:
    """Let `make` put the very bytes of one file under another name; what is known of its digest goes along.

    A new hard link changes the inode's time, so it has to be said that the contents are the same.
    """
    known = _known.get(_identity(source.stat()))
    make(source, target)
    if known is not None:
        _known[_identity(source.stat())] = _known[_identity(target.stat())] = known


def _identity(said: os.stat_result) -> tuple[int, int, int, int, int]:
    return said.st_dev, said.st_ino, said.st_size, said.st_mtime_ns, said.st_ctime_ns
