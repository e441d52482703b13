"""`pathmark.card`: what an owner can publish with a model: a section for its card, and a badge."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathmark.keys import load_commitment
from pathmark.keys.safefile import write_whole
from pathmark.reporting.card import badge, card_section


@dataclass(frozen=True)
class Card:
    """Made from a published commitment alone."""

    section: str
    """Markdown."""
    badge: str
    """SVG."""
    files: tuple[Path, ...] = ()
    """What was written."""

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark card --json`."""
        return {"section": self.section, "badge": self.badge, "files": [str(file) for file in self.files]}

    def words(self) -> str:
        """The section itself, or where it is."""
        return f"Written: {', '.join(map(str, self.files))}." if self.files else self.section


def card(
    commitment: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    badge_file: str | os.PathLike[str] | None = None,
) -> Card:
    """The section and the badge of a commitment whose signature holds, written where files are named.

    Example:
        pathmark.card("release.commitment.json").section
    """
    made = load_commitment(os.fspath(commitment))
    section, drawn = card_section(made, Path(commitment).name), badge(made)
    files = []
    for name, text in ((output, section), (badge_file, drawn)):
        if name is not None:
            write_whole(Path(name), text.encode())
            files.append(Path(name))
    return Card(section, drawn, tuple(files))
