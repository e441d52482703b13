"""The key of a scheme that is not ours: its name, one secret and its settings, in the container of other keys."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from pathmark.errors import KeyFileError
from pathmark.keys.canonical import parse_object
from pathmark.keys.derive import SECRET_BYTES
from pathmark.keys.keyfile import SCHEME_MAGIC, SCRYPT_N, PassphraseSource, seal_payload, unseal_payload
from pathmark.keys.safefile import read_private, write_private

VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class SchemeKey:
    """What marks and finds a mark of one scheme."""

    scheme: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the scheme's config, by name: numbers, truth values and texts."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)

    def __post_init__(self) -> None:
        if not self.scheme or len(self.secret) != SECRET_BYTES:
            raise KeyFileError(f"a scheme's key has a name and {SECRET_BYTES} secret bytes, got neither or one of them")

    @property
    def fingerprint(self) -> str:
        """A public name of the secret."""
        return (
            "scheme-" + sha256(b"pathmark scheme key\0" + self.scheme.encode() + b"\0" + self.secret).hexdigest()[:16]
        )

    def summary(self) -> dict[str, Any]:
        """What may be shown."""
        return {"fingerprint": self.fingerprint, "scheme": self.scheme, "settings": dict(self.settings)}


def save_scheme_key(
    key: SchemeKey, path: Path | str, passphrase: str | None, *, plain: bool = False, scrypt_n: int = SCRYPT_N
) -> None:
    """Write a new file, mode 0600, encrypted unless `plain`; an existing file is never overwritten."""
    record = {"version": VERSION, "scheme": key.scheme, "settings": dict(key.settings), "secret": key.secret.hex()}
    payload = json.dumps(record, sort_keys=True).encode()
    sealed = seal_payload(payload, passphrase, plain=plain, scrypt_n=scrypt_n, magic=SCHEME_MAGIC)
    write_private(Path(path), sealed)


def load_scheme_key(path: Path | str, passphrase: PassphraseSource = None) -> SchemeKey:
    """Open a file that save_scheme_key() wrote."""
    data = read_private(Path(path), "the key of a scheme")
    record = parse_object(unseal_payload(data, passphrase, name=str(path), magic=SCHEME_MAGIC)) or {}
    if record.get("version") != VERSION:
        raise KeyFileError(
            f"{path} has scheme key version {record.get('version')}, expected {VERSION}; update pathmark"
        )
    try:
        scheme, settings, secret = str(record["scheme"]), dict(record["settings"]), bytes.fromhex(record["secret"])
    except (KeyError, TypeError, ValueError):
        raise KeyFileError(f"{path}: its record has missing or malformed fields; restore it from a backup") from None
    return SchemeKey(scheme=scheme, settings=settings, secret=secret)
