"""Chain of custody: who had the suspect since when, how it was obtained, and what its files were on receipt."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from pathmark.errors import VerificationError
from pathmark.keys.key import utc_now
from pathmark.results.evidence import CustodyStep

FIELDS = ("who", "when", "how")
EXAMPLE = '[[step]] with who = "...", when = "2026-11-02", how = "..." and, if computed on receipt, root = "..."'


def custody_steps(file: str | os.PathLike[str] | None, obtained: str, root: str) -> tuple[CustodyStep, ...]:
    """The steps in a file; without one, that the suspect is here now. A root on receipt must be the present one."""
    if file is None:
        return (CustodyStep(who="not stated", when=utc_now(), how=obtained, root=root),)
    steps = read_custody(Path(file))
    for number, step in enumerate(steps, 1):
        if step.root is not None and step.root != root:
            raise VerificationError(
                f"{file}, step {number}: the files received had the root {step.root[:12]}..., those examined have "
                f"{root[:12]}...; examine what was received"
            )
    return steps


def read_custody(path: Path) -> tuple[CustodyStep, ...]:
    """The steps in a custody file."""
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("step")
    except OSError as error:
        raise VerificationError(f"cannot read {path}: {error.strerror}; expected a custody file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise VerificationError(f"{path} is no TOML; expected {EXAMPLE}") from None
    if not isinstance(rows, list) or not rows:
        raise VerificationError(f"{path} has no steps; expected {EXAMPLE}")
    return tuple(_step(row, path) for row in rows)


def _step(row: Any, path: Path) -> CustodyStep:
    known = isinstance(row, dict) and set(FIELDS) <= row.keys() <= {*FIELDS, "root"}
    if not known:
        raise VerificationError(f"{path} has a step with other fields; expected {EXAMPLE}")
    return CustodyStep(
        who=str(row["who"]), when=str(row["when"]), how=str(row["how"]),
        root=None if row.get("root") is None else str(row["root"]),
    )  # fmt: skip
