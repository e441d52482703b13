"""`pathmark.report`: a result as a page that stands alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathmark.errors import ReportError
from pathmark.reporting.page import kind_of, result_page


@dataclass(frozen=True)
class Report:
    """One HTML file, without scripts; nothing is fetched."""

    kind: str
    """What it shows: an embedding, a verification, a robustness suite or the demo."""
    output: Path

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark report --json`."""
        return {"kind": self.kind, "output": str(self.output)}

    def words(self) -> str:
        """One sentence for people."""
        return f"The page of this {self.kind} is in {self.output}."


def report(result: Mapping[str, Any] | str | os.PathLike[str], output: str | os.PathLike[str]) -> Report:
    """A page from what `embed`, `verify`, `verify-api`, `verify-routes` or `robustness` left as JSON, or from a
    result's `.summary()`.

    Example:
        pathmark.report(pathmark.verify("./suspect", "owner.key").summary(), "verdict.html")
    """
    found = result if isinstance(result, Mapping) else _read(Path(result))
    kind, page = kind_of(found), result_page(found)
    path = Path(output)
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(page)
    except FileExistsError:
        raise ReportError(f"{path} already exists; choose another name, nothing is overwritten") from None
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}") from None
    return Report(kind, path)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}; expected a result file") from None
    except ValueError:
        raise ReportError(f"{path} is no JSON; expected what a command printed with --json") from None
    if not isinstance(found, dict):
        raise ReportError(f"{path} holds no JSON object; expected what a command printed with --json")
    return found
