"""What a result file says about itself, and how it is read, written and put beside others of its kind."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pathmark.errors import ResultError
from pathmark.keys.safefile import write_private
from pathmark.results.schema import from_json, to_json


@dataclass(frozen=True, kw_only=True)
class Header:
    """What was measured, and with what. Files whose headers differ in more than key, model and seed do not mix."""

    format: str
    """Which experiment."""
    version: int
    """Of the file's layout."""
    package: str
    """Version of this package."""
    torch: str | None
    """Version of torch. None in files of robustness version 1, which did not keep it."""
    model_sha256: str | None
    """The model examined: over names and digests of its weight files; its first 16 digits in files of robustness
    version 1. None where every row has a model of its own."""
    original_sha256: str | None
    """The unmarked model, likewise. None where none was at hand."""
    texts_sha256: Mapping[str, str]
    """Use -> digest of the texts used so, joined by line breaks."""
    key: str | None
    """Fingerprint of the owner's key. None where every row has a key of its own, and where a file of robustness version
    1 is all there is: it had the fingerprint in a hash only."""
    seed: int
    """Of everything that was drawn, secrets aside."""
    n_probes: int
    """Held-out texts that each figure stands on."""
    settings: Mapping[str, Any]
    """What else was chosen."""

    def __post_init__(self) -> None:
        for digest in (self.model_sha256, self.original_sha256, *self.texts_sha256.values()):
            if digest is not None and not re.fullmatch(r"[0-9a-f]{16}|[0-9a-f]{64}", digest):
                raise ValueError(f"expected a sha256 in hexadecimal digits, got {digest!r}")

    def differs(self, other: Header, but: Sequence[str] = ()) -> list[str]:
        """Names of the fields in which two headers differ."""
        names = [field.name for field in fields(self) if field.name not in but]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


class Result(Protocol):
    """A frozen dataclass whose first field is its header."""

    @property
    def header(self) -> Header:
        """What was measured, and with what."""


R = TypeVar("R", bound=Result)


def texts_digest(texts: Sequence[str]) -> str:
    """sha256 of texts, joined by line breaks."""
    return sha256("\n".join(texts).encode()).hexdigest()


def read_result(path: Path, kind: type[R], name: str, version: int) -> R:
    """The result in a file of this format and version, or a refusal in one line."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        header = content["header"]
        found = header["format"], header["version"]
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror or 'input/output error'}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ResultError(f"{path} is no result file; expected {name}, version {version}") from error
    if found != (name, version):
        raise ResultError(f"{path}: expected {name}, version {version}, got {found[0]}, version {found[1]}")
    try:
        return from_json(kind, content)
    except ResultError as error:
        raise ResultError(f"{path} is damaged: {error}; measure again") from error


def write_result(path: Path, result: Result) -> None:
    """Beside, then renamed; readable by its owner alone, since it says where a mark is weak."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, (json.dumps(to_json(result), indent=1) + "\n").encode(), replace=True)


def pooled(results: Mapping[str, R]) -> list[R]:
    """Results of one measurement on several keys, by the names of their files; a mixture or a repetition is refused."""
    found = list(results.items())
    for i, (name, result) in enumerate(found):
        first = found[0]
        if different := result.header.differs(first[1].header, but=("key", "model_sha256", "seed")):
            raise ResultError(f"{name} and {first[0]} do not mix: they differ in {', '.join(different)}")
        for earlier, other in found[:i]:
            if not result.header.differs(other.header, but=("key",)):
                raise ResultError(f"{name} and {earlier} are the same measurement; keep one")
    return [result for _, result in found]
