"""One digest for all files of a model folder, as OpenSSF model signing (`model_signing`) computes it.

The root is the sha256 over the files' own sha256 digests, in the order of their paths compared part by part. Files
that version control and download tools add at the top are left out, and the description says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from pathmark.errors import KeyFileError
from pathmark.keys.canonical import Document
from pathmark.keys.digests import file_digest
from pathmark.keys.release import Progress, ReleasedFile, hash_release

IGNORED: Final = (".cache", ".git", ".gitattributes", ".github", ".gitignore")
SIGNATURE: Final = "https://model_signing/signature/v1.0"
"""Predicate type of a model signature."""


def model_files(path: Path, progress: Progress | None = None) -> list[ReleasedFile]:
    """Digest of every file of a folder, or of one file, in the order of the root."""
    if path.is_file():
        return [ReleasedFile(path.name, path.stat().st_size, file_digest(path))]
    found = [f for f in hash_release(path, progress) if PurePosixPath(f.path).parts[0] not in IGNORED]
    if not found:
        raise KeyFileError(f"{path} has no files of a model; expected a model folder")
    return sorted(found, key=lambda f: PurePosixPath(f.path).parts)


def model_root(files: Sequence[ReleasedFile]) -> str:
    """The root over files in their order."""
    return hashlib.sha256(b"".join(bytes.fromhex(file.sha256) for file in files)).hexdigest()


def serialization(path: Path) -> Document:
    """How the root is computed, in the words of that format."""
    links = path.is_dir() and any(place.is_symlink() for place in path.rglob("*"))
    return {"method": "files", "hash_type": "sha256", "allow_symlinks": links, "ignore_paths": list(IGNORED)}


def signature_statement(name: str, files: Sequence[ReleasedFile], how: Document) -> Document:
    """The in-toto statement of a model signature over these files; whoever signs it vouches for the model."""
    resources = [{"name": f.path, "algorithm": "sha256", "digest": f.sha256} for f in files]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": model_root(files)}}],
        "predicateType": SIGNATURE,
        "predicate": {"serialization": how, "resources": resources},
    }
