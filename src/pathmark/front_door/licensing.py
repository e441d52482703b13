"""One copy per licensee: allot an id, write the key of that copy and a receipt; check who got which."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathmark.errors import KeyFileError
from pathmark.keys import Issued, OwnerKey, Registry, load_key, save_key
from pathmark.keys.key import fingerprint
from pathmark.keys.keyfile import PassphraseSource, is_plain, passphrase_from_environment
from pathmark.keys.receipts import Receipt, load_receipt, load_signing_key, write_receipt
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
    receipt: Path | None = None
    """For the licensee to countersign, where one was asked for."""

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
            "receipt": None if self.receipt is None else str(self.receipt),
        }

    def words(self) -> str:
        """Some lines for people."""
        entry, layers = self.entry, len(self.key.watermarks[self.watermark].code.radices)
        return (
            f"{entry.licensee}: id {entry.id}{'' if self.new else f' (issued {entry.issued})'}\n"
            f"differs in at least {entry.distance} of {layers} layers from every id before; nearest two of all: "
            f"{self.distance_all}{'' if self.file is None else f'{chr(10)}key of this copy: {self.file}'}"
            f"{'' if self.receipt is None else f'{chr(10)}receipt for the licensee to countersign: {self.receipt}'}"
        )


def issue(
    key_file: str | os.PathLike[str],
    registry: str | os.PathLike[str],
    licensee: str,
    *,
    watermark: int = 0,
    output: str | os.PathLike[str] | None = None,
    receipt: str | os.PathLike[str] | None = None,
    passphrase: PassphraseSource = None,
) -> Licensed:
    """Allot an id to a licensee, as far from all before as the layers allow; asking again gives the same.

    `receipt`: a file to write, which the licensee countersigns (`countersign`).
    """
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
    if receipt is not None:
        write_receipt(Receipt(*book.row(entry.licensee)), Path(receipt))
    return Licensed(entry, new, copy, file, watermark, book.distance(), None if receipt is None else Path(receipt))


@dataclass(frozen=True)
class Countersigned:
    """A receipt with the licensee's signature under it."""

    receipt: Receipt
    file: Path

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark registry countersign --json`."""
        row, seen = self.receipt.row, self.receipt
        return {
            "output": str(self.file), "licensee": seen.name, "id": row["id"], "issued": row["issued"],
            "owner": fingerprint(seen.owner), "signer": seen.signer,
        }  # fmt: skip

    def words(self) -> str:
        """What was signed, for the licensee."""
        row, seen = self.receipt.row, self.receipt
        return (
            f"{self.file}: {seen.name} confirms that the copy with id {row['id']} was issued on {row['issued']} by the "
            f"owner of key {fingerprint(seen.owner)}.\nSigned with key {seen.signer}; hand the file back to the owner."
        )


def countersign(
    receipt: str | os.PathLike[str], signing_key: str | os.PathLike[str], output: str | os.PathLike[str]
) -> Countersigned:
    """Put a licensee's signature (Ed25519, PEM) under the owner's receipt; an altered receipt is refused."""
    signed = load_receipt(Path(receipt)).countersigned_by(load_signing_key(Path(signing_key)))
    write_receipt(signed, Path(output))
    return Countersigned(signed, Path(output))


@dataclass(frozen=True)
class CheckedRegistry:
    """Whether a registry is as the owner's key signed it, and which licensees have confirmed their rows."""

    fingerprint: str
    issued: int
    problems: tuple[str, ...]
    confirmed: dict[str, str]
    """Licensee -> fingerprint of the key that countersigned."""

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark registry check --json`."""
        return {
            "holds": self.holds,
            "problems": list(self.problems),
            "issued": self.issued,
            "fingerprint": self.fingerprint,
            "countersigned": self.confirmed,
        }

    def words(self) -> str:
        """Some lines for people."""
        lines = list(self.problems) or [f"All {self.issued} rows are as key {self.fingerprint} signed them."]
        lines += [
            f"{name} has countersigned with key {key}; ask {name} whether that is theirs"
            for name, key in self.confirmed.items()
        ]
        return "\n".join(lines)


def check_registry(
    registry: str | os.PathLike[str], receipts: Sequence[str | os.PathLike[str]] = ()
) -> CheckedRegistry:
    """Check that every row is as the owner's key signed it, and that countersigned receipts are of these rows."""
    book = Registry(Path(registry))
    problems, confirmed = book.problems(), dict[str, str]()
    for path in receipts:
        try:
            receipt = load_receipt(Path(path))
            if not receipt.countersigned:
                problems.append(f"{path}: {receipt.name} has not countersigned it")
            elif (receipt.owner, receipt.row, receipt.signature) != book.row(receipt.name):
                problems.append(f"{path}: the receipt of {receipt.name} is of another row than the registry's")
            else:
                confirmed[receipt.name] = receipt.signer
        except KeyFileError as error:
            problems.append(f"{path}: {error}")
    return CheckedRegistry(book.fingerprint(), len(book.entries()), tuple(problems), confirmed)
