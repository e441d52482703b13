"""Texts from files: plain text, JSON lines, and folders of both."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path

from pathmark.errors import ModelError

SUFFIXES = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")
Texts = str | os.PathLike[str] | Sequence[str]
"""The path of a file or folder of texts, or the texts themselves."""


def given_texts(texts: Texts) -> list[str]:
    """Texts as they were given: read from a file, or already in memory."""
    return read_texts(Path(texts)) if isinstance(texts, str | os.PathLike) else list(texts)


def read_texts(path: Path) -> list[str]:
    """Every text of a file or folder, in order.

    `.txt`: a text per paragraph (blank line between) or, without blank lines, per line. `.jsonl`: the field
    `text` of each line. Either may be gzipped. A folder is the sum of such files, by name.
    """
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.name.endswith(SUFFIXES))
        if not files:
            raise ModelError(f"{path} holds no {', '.join(SUFFIXES)} files")
        return [text for file in files for text in read_texts(file)]
    if not path.is_file():
        raise ModelError(f"{path} does not exist; expected a text file, JSON lines or a folder of them")
    if not path.name.endswith(SUFFIXES):
        raise ModelError(f"{path} is none of {', '.join(SUFFIXES)}")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        content = raw.decode("utf-8")
    except (UnicodeDecodeError, OSError, EOFError) as error:
        raise ModelError(f"{path} cannot be read as UTF-8 text: {error}") from error
    if ".jsonl" in path.suffixes:
        return _json_lines(path, content)
    pieces = content.split("\n\n") if "\n\n" in content else content.split("\n")
    return [piece.strip() for piece in pieces if piece.strip()]


def _json_lines(path: Path, content: str) -> list[str]:
    texts = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise ModelError(f"{path}, line {number}: expected a JSON object with a string field `text`")
        texts.append(text)
    return texts


def split_held_out(texts: list[str], held_out: int) -> tuple[list[str], list[str]]:
    """(training, held-out): every n-th text is held out, at most a tenth of all."""
    count = max(1, min(held_out, len(texts) // 10))
    stride = max(1, len(texts) // count)
    places = set(range(0, stride * count, stride))
    return [t for i, t in enumerate(texts) if i not in places], [t for i, t in enumerate(texts) if i in places]
