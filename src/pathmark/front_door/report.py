"""`pathmark.report`: a result or an evidence bundle as a page that stands alone, and on paper."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathmark.errors import ReportError
from pathmark.keys.safefile import write_private
from pathmark.reporting.page import result_page
from pathmark.reporting.pdf import find_browser, print_page
from pathmark.results.bundlefile import is_zip
from pathmark.results.evidence import EvidenceBundle


@dataclass(frozen=True)
class Report:
    """One HTML file that fetches nothing, readable by its owner alone, since it may show what is secret."""

    kind: str
    """What it shows: an embedding, a verification, a robustness run or the demo."""
    output: Path
    pdf: Path | None = None

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark report --json`."""
        return {"kind": self.kind, "output": str(self.output), "pdf": None if self.pdf is None else str(self.pdf)}

    def words(self) -> str:
        """One sentence for people."""
        printed = "" if self.pdf is None else f", on paper in {self.pdf}"
        return f"The page of this {self.kind} is in {self.output}{printed}."


def report(
    result: Mapping[str, Any] | str | os.PathLike[str], output: str | os.PathLike[str], *, pdf: bool = False
) -> Report:
    """A page from an evidence bundle, from what `embed`, `robustness` or a verifying command left as JSON, or from a
    result's `.summary()`; with `pdf` also printed, beside it.

    Example:
        pathmark.report(pathmark.verify("./suspect", "owner.key").summary(), "verdict.html")
    """
    path = Path(output)
    printed = path.with_suffix(".pdf") if pdf else None
    for file in filter(None, (path, printed)):
        if file.exists():
            raise ReportError(f"{file} already exists; choose another name, nothing is overwritten")
    if pdf:
        find_browser()
    found = result if isinstance(result, Mapping) else _read(Path(result))
    kind, page = result_page(found, "DIR" if isinstance(result, Mapping) else os.fspath(result))
    if printed is not None:
        write_private(printed, print_page(page))
    write_private(path, page.encode())
    return Report(kind, path, printed)


def _read(path: Path) -> Mapping[str, Any] | EvidenceBundle:
    if path.is_dir() or is_zip(path):
        return EvidenceBundle.load(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}; expected a result file or a bundle") from None
    except ValueError:
        raise ReportError(f"{path} is no JSON; expected what a command printed with --json") from None
    if not isinstance(found, dict):
        raise ReportError(f"{path} holds no JSON object; expected what a command printed with --json")
    return found
