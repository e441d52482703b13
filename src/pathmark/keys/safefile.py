"""Files that hold secrets: private from the first byte, whole or not there, never overwritten by accident."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from pathmark.errors import KeyFileError

MAX_BYTES = 1 << 30
"""Largest file that is read; a key with sketches has a few megabytes."""


def read_private(path: Path, what: str) -> bytes:
    """The bytes of a file that only its owner may read; KeyFileError otherwise."""
    try:
        # Not blocking: opening a pipe would wait for a writer that never comes.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise KeyFileError(f"{path} is not a file; expected {what}")
            require_private(path, status)
            if status.st_size > MAX_BYTES:
                raise KeyFileError(f"{path} has {status.st_size} bytes; {what} has at most {MAX_BYTES}")
            return file.read()
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror or 'input/output error'}") from None


def require_private(path: Path, status: os.stat_result | None = None) -> None:
    """Refuse a file that others may read or change."""
    mode = stat.S_IMODE((status or path.stat()).st_mode)
    if os.name == "posix" and mode & 0o077:
        raise KeyFileError(
            f"{path} may be read or changed by others (mode {mode:04o}, expected 0600); if it is the right file, "
            f"run: chmod 600 {path} - and make a new key if others had access"
        )


@contextlib.contextmanager
def exclusive(path: Path, *, busy: str | None = None) -> Iterator[None]:
    """Hold the lock of a file while it is read, compared and replaced.

    The lock is a file beside it that is never replaced: whoever waited on the old file would otherwise hold a lock on
    something that is not there any more. With `busy`, nobody waits: that is what is said where another has the lock.
    """
    try:
        import fcntl
    except ImportError:  # not POSIX: the comparison alone has to do
        yield
        return
    try:
        descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KeyFileError(f"cannot lock {path}: {error.strerror or 'input/output error'}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if busy is None else fcntl.LOCK_NB))
        except BlockingIOError:
            raise KeyFileError(busy or "") from None
        yield
    finally:
        os.close(descriptor)


def write_private(path: Path, data: bytes, *, replace: bool = False) -> None:
    """Write beside, sync, then put in place with mode 0600.

    Without `replace` an existing file is never touched, also if it appears in the meantime.
    """
    write_whole(path, data, replacing=replace, mode=0o600)


def write_whole(path: Path, data: bytes, *, replacing: bool = False, mode: int = 0o666) -> None:
    """A file that appears whole or not at all: written beside, synced, then put in place."""
    if not replacing and os.path.lexists(path):
        raise KeyFileError(f"{path} already exists; choose another name, nothing is overwritten")
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if replacing:
                beside.replace(path)
            else:
                _place_new(beside, path, mode)
        finally:
            beside.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except FileExistsError:
        raise KeyFileError(f"{path} already exists; choose another name, nothing is overwritten") from None
    except OSError as error:
        raise KeyFileError(f"cannot write {path}: {error.strerror or 'input/output error'}") from None


def _place_new(beside: Path, path: Path, mode: int) -> None:
    """Rename that fails if the target exists. A hard link does that in one step."""
    try:
        os.link(beside, path)
    except FileExistsError:
        raise
    except OSError:
        # No hard links on this file system: claim the name first, then move onto the empty claim.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        beside.replace(path)


def _sync_folder(folder: Path) -> None:
    """Make the new name itself survive a power cut, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
