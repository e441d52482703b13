"""One copy per licensee: allot an id, and write the key of that copy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathmark.keys import Issued, OwnerKey, Registry, load_key, save_key
from pathmark.keys.keyfile import PassphraseSource, is_plain, passphrase_from_environment
from pathmark.keys.spread import guaranteed_distance


@dataclass(frozen=True)
class Licensed:
    """A licensee's id, how far it is from all others, and the key of its copy."""

    entry: Issued
    new: bool
    """False: this name had its id already."""
    key: OwnerKey
    """The copy's: the same triggers, another path."""
    file: Path | None
    watermark: int
    distance_all: int | None
    """Layers in which the nearest two of all ids differ."""

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark issue --json`."""
        entry, code = self.entry, self.key.watermarks[self.watermark].code
        return {
            "licensee": entry.licensee,
            "id": entry.id,
            "new": self.new,
            "ordinal": entry.ordinal,
            "issued": entry.issued,
            "layers": len(code.radices),
            "distance": entry.distance,
            "distance_all": self.distance_all,
            "distance_guaranteed": guaranteed_distance(code, entry.ordinal),
            "ids": code.capacity,
            "file": None if self.file is None else str(self.file),
        }

    def words(self) -> str:
        """Some lines for people."""
        entry, layers = self.entry, len(self.key.watermarks[self.watermark].code.radices)
        return (
            f"{entry.licensee}: id {entry.id}{'' if self.new else f' (issued {entry.issued})'}\n"
            f"differs in at least {entry.distance} of {layers} layers from every id before; nearest two of all: "
            f"{self.distance_all}{'' if self.file is None else f'{chr(10)}key of this copy: {self.file}'}"
        )


def issue(
    key_file: str | os.PathLike[str],
    registry: str | os.PathLike[str],
    licensee: str,
    *,
    watermark: int = 0,
    output: str | os.PathLike[str] | None = None,
    passphrase: PassphraseSource = None,
) -> Licensed:
    """Allot an id to a licensee, as far from all before as the layers allow; asking again gives the same."""
    master = Path(key_file)
    plain = is_plain(master)
    phrase = None
    if not plain:
        phrase = passphrase if isinstance(passphrase, str) else (passphrase or passphrase_from_environment)()
    key = load_key(master, phrase)
    book = Registry(Path(registry))
    entry, new = book.issue(key, licensee, watermark=watermark)
    copy, file = key.with_id(entry.id, watermark), None if output is None else Path(output)
    if file is not None:
        save_key(copy, file, phrase, plain=plain)
    return Licensed(entry, new, copy, file, watermark, book.distance())
