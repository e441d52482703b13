"""Files of an evidence bundle: a folder or a zip, written whole or not at all, read without trusting it.

A zip is written in one way only (stored, sorted, one date), so that the same files are the same bytes and nothing can
hide between them.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from pathmark.errors import ResultError
from pathmark.keys.safefile import write_private

MAX_FILES: Final = 10_000
MAX_BYTES: Final = 1 << 30
"""Largest bundle that is read; one with an owner's profiles has a few megabytes."""
_DATE: Final = (1980, 1, 1, 0, 0, 0)


def is_zip(path: Path) -> bool:
    """Whether a bundle of this name is one file."""
    return path.suffix.lower() == ".zip"


def read_bundle(path: Path) -> dict[str, bytes]:
    """Name -> content of every file, or a refusal in one line."""
    try:
        if path.is_dir():
            return _read_folder(path)
        if path.is_file():
            if path.stat().st_size > MAX_BYTES:
                raise ResultError(f"{path} is too large for an evidence bundle; expected at most {MAX_BYTES:,} bytes")
            return _read_zip(path.read_bytes(), path)
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror or 'input/output error'}") from None
    raise ResultError(f"{path} does not exist; expected the folder or zip that --evidence wrote")


def write_bundle(path: Path, files: Mapping[str, bytes]) -> None:
    """A new folder, or a zip where the name ends so; readable by its owner alone."""
    if os.path.lexists(path):
        raise ResultError(f"{path} already exists; choose another --evidence, nothing is overwritten")
    if is_zip(path):
        write_private(path, zip_bytes(files))
        return
    partial = path.with_name(f".{path.name}.part")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700, parents=True)
        for name, content in files.items():
            place = partial / name
            place.parent.mkdir(mode=0o700, exist_ok=True)
            write_private(place, content)
        partial.rename(path)
    except OSError as error:
        raise ResultError(f"cannot write {path}: {error.strerror or 'input/output error'}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def zip_bytes(files: Mapping[str, bytes]) -> bytes:
    """The one zip of these files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.create_system, entry.external_attr = 3, 0o600 << 16
            archive.writestr(entry, files[name])
    return buffer.getvalue()


def _read_folder(folder: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    size = 0
    for base, folders, names in os.walk(folder):
        for name in sorted(folders) + sorted(names):
            place = Path(base) / name
            shown = place.relative_to(folder).as_posix()
            mode = place.lstat().st_mode
            if stat.S_ISDIR(mode):
                continue
            if not stat.S_ISREG(mode):
                raise ResultError(f"{shown} is a link or a device; an evidence bundle holds plain files only")
            size += place.stat().st_size
            if size > MAX_BYTES or len(found) >= MAX_FILES:
                raise ResultError(f"{folder} is too large for an evidence bundle; is it another folder?")
            found[shown] = place.read_bytes()
    return found


def _read_zip(data: bytes, path: Path) -> dict[str, bytes]:
    """The files, if the zip is what `zip_bytes` makes of them, byte for byte."""
    if not data.startswith(b"PK"):
        raise ResultError(f"{path} is no evidence bundle; expected the folder or zip that --evidence writes")
    name, found = "its list of files", {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if len(entries) > MAX_FILES or sum(entry.file_size for entry in entries) > len(data):
                raise ResultError(f"{path} is no evidence bundle: it promises more than it holds")
            for entry in entries:
                name = entry.filename
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or name in found:
                    raise ResultError(f"{path} is no evidence bundle: {name[:80]!r} is no name of a file in it")
                found[name] = archive.read(entry)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, EOFError) as error:
        if isinstance(error, ResultError):
            raise
        raise ResultError(f"{path} was altered: {name} cannot be read from it") from None
    if zip_bytes(found) != data:
        raise ResultError(f"{path} was altered: it is not the zip that --evidence writes of these files")
    return found
