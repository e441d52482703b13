"""The one layout of every page: a verdict, then sections of words, pictures, tables and commands; in one file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Literal

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup, escape

from pathmark.reporting.pictures import Picture

Tone = Literal["yes", "no", "undecided"]


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str | Markup
    value: float | None = None
    """What the column is sorted by, where that is not the text."""
    tone: Literal["good", "bad", "token", ""] = ""

    @property
    def attributes(self) -> Markup:
        """Of the cell's element."""
        sorted_by = Markup(' data-value="{}"').format(self.value) if self.value is not None else ""
        return (Markup(' class="{}"').format(self.tone) if self.tone else Markup("")) + sorted_by


@dataclass(frozen=True)
class Table:
    """Rows under headings; the first cell of each row names it."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    sortable: bool = False
    style: Literal["path", ""] = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One question and its answer; what is empty is not shown."""

    name: str
    title: str
    paragraphs: Sequence[str | Markup] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    points: Sequence[str] = ()
    commands: str = ""


@dataclass(frozen=True)
class Verdict:
    """Words that stand first."""

    tone: Tone
    words: str

    @property
    def lines(self) -> list[str]:
        """The sentences for everybody; what follows an empty line has sections of its own."""
        return [line for line in self.words.split("\n\n")[0].splitlines() if line.strip()]


@dataclass(frozen=True, kw_only=True)
class Page:
    """Everything that a page shows."""

    kind: str
    title: str
    subtitle: str | Markup = ""
    verdicts: Sequence[Verdict] = ()
    sections: Sequence[Section] = field(default_factory=tuple)

    def render(self) -> str:
        """The HTML file."""
        sortable = any(table.sortable for section in self.sections for table in section.tables)
        script = _template("sort.js")
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        return _environment().get_template("page.html").render(
            page=self, style=_template("page.css"), script=script, sortable=sortable,
            script_hash=f"sha256-{digest}", version=version("pathmark"),
        )  # fmt: skip


def row(*cells: object) -> list[Cell]:
    """Cells of plain text."""
    return [cell if isinstance(cell, Cell) else Cell(str(cell)) for cell in cells]


def code(text: str) -> Markup:
    """A command or a file inside a sentence."""
    return Markup("<code>{}</code>").format(escape(text))


def _template(name: str) -> str:
    return (files("pathmark.reporting") / "templates" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    return Environment(
        loader=DictLoader({"page.html": _template("page.html")}), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
