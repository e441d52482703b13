"""Texts of the experiments: files that the user names, cut into passages. Nothing is downloaded."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from pathmark.errors import ModelError, instead
from pathmark.models.texts import read_texts

KNOWN: Mapping[str, tuple[str, ...]] = {
    "home": ("train", "test"),
    "wikitext": ("train", "test"),
    "ptb": ("train", "test"),
    "c4": ("prefixes",),
    "mmlu": ("dev", "test"),
    "gsm8k": ("train", "test"),
}
"""Corpus -> the files that it has."""
QUESTIONS = ("mmlu", "gsm8k")
"""Those that are no running text."""
WORDS = 150
"""Of a passage: about 200 tokens, so that 128 are there."""


@dataclass(frozen=True)
class Corpora:
    """Where the texts are."""

    paths: Mapping[str, Mapping[str, Path]] = field(default_factory=dict)
    """Corpus -> use -> file or folder."""

    @classmethod
    def read(cls, file: Path) -> Corpora:
        """From a TOML file; paths in it are relative to its folder."""
        try:
            found = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(f"cannot read {file}: {error.strerror}; expected a TOML file of corpora") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{file} is no TOML file: {error}; docs/reproduce.md shows one") from error
        paths: dict[str, dict[str, Path]] = {}
        for name, entry in found.items():
            if name not in KNOWN:
                raise ModelError(f"{file} names the corpus {name!r}; {instead(name, list(KNOWN))}")
            uses = sorted(entry) if isinstance(entry, dict) else []
            if uses != sorted(KNOWN[name]) or not all(isinstance(place, str) for place in entry.values()):
                raise ModelError(f"{file}, [{name}]: expected a path for each of {', '.join(KNOWN[name])}")
            paths[name] = {use: file.parent / place for use, place in entry.items()}
        return cls(paths)

    def path(self, name: str, use: str) -> Path:
        """A file or folder of a corpus, or one line that says how to name it."""
        if name not in self.paths:
            raise ModelError(
                f"the corpus {name} is not named; give it as [{name}] in a file of corpora and that with --corpora"
            )
        place = self.paths[name][use]
        if not place.exists():
            raise ModelError(f"{place} ({name}, {use}) does not exist; correct its path in the file of corpora")
        return place

    def digest(self, name: str) -> str:
        """Over the names and the bytes of a corpus's files."""
        total = sha256()
        for use in KNOWN[name]:
            place = self.path(name, use)
            for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
                if file.is_file():
                    total.update(f"{use}/{file.name}\n".encode() + sha256(file.read_bytes()).digest())
        return total.hexdigest()

    def named(self, name: str) -> str:
        """Its files as a page names them: each with the folder that it is in."""
        places = (self.path(name, use).resolve() for use in KNOWN[name])
        return ", ".join(f"{place.parent.name}/{place.name}" for place in places)

    def passages(self, name: str, use: str, count: int, seed: int = 0) -> list[str]:
        """So many passages at random, or all that there are."""
        found = passages(read_texts(self.path(name, use)))
        return random.Random(seed).sample(found, min(count, len(found)))


def passages(texts: Sequence[str], words: int = WORDS) -> list[str]:
    """Texts one after the other, cut where there are enough words; what is left over at the end is dropped."""
    found, begun, size = list[str](), list[str](), 0
    for text in texts:
        begun.append(text)
        size += len(text.split())
        if size >= words:
            found.append(" ".join(begun))
            begun, size = [], 0
    return found
