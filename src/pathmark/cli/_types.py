"""What an argument must be, told before anything heavy is loaded: files that are there, names that are free, models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from pathmark.errors import KeyFileError, ModelError, ReportError

BUNDLED = Path(__file__).parent.parent / "bundled"


class Existing(click.ParamType[Path]):
    """A path at which there is something."""

    name = "path"

    def __init__(self, expected: str) -> None:
        self.expected = expected

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, or a refusal."""
        path = Path(value)
        if not os.path.lexists(path):
            raise KeyFileError(f"cannot read {path}: No such file or directory; expected {self.expected}")
        return path


class New(click.ParamType[Path]):
    """A path at which there is nothing yet."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path, or a refusal."""
        path = Path(value)
        if os.path.lexists(path):
            raise ReportError(f"{path} already exists; choose another name, nothing is overwritten")
        return path


class Model(click.ParamType[str]):
    """A folder, a hub id or a bundled model; what can only be a folder has to be there."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name as it is, or a refusal."""
        text = str(value)
        if text.startswith("bundled:") and not (BUNDLED / text.removeprefix("bundled:") / "config.json").is_file():
            have = ", ".join(sorted(f"bundled:{found.parent.name}" for found in BUNDLED.glob("*/config.json")))
            raise ModelError(f"{text} is not bundled; expected one of {have}")
        looks_like_a_path = text.startswith((".", "/", "~")) or text.count("/") > 1
        if looks_like_a_path and not os.path.lexists(text):
            raise ModelError(f"{text!r} does not exist; expected a model folder, a hub id or bundled:tiny")
        return text


KEY, NEW, MODEL = Existing("a key made by `pathmark keygen`"), New(), Model()
COMMITMENT, ROOTS = Existing("a commitment"), Existing("root certificates (PEM)")
TEXTS = Existing("a text file, JSON lines or a folder of them")
REGISTRY = Existing("a registry; `pathmark issue` makes it")
SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)
