"""The key on disk: one line of JSON header, then the payload, encrypted unless asked otherwise.

The header says how to open the file and is authenticated together with the payload. Opening fails in
one way only, with a KeyFileError of one line that never holds a byte of the payload.
docs/key-format.md describes the container.
"""

from __future__ import annotations

import hmac
import os
import secrets
import struct
import unicodedata
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from pathmark.errors import KeyFileError, PathmarkError
from pathmark.keys.canonical import Document, canonical, parse_object
from pathmark.keys.derive import FORMAT_VERSION
from pathmark.keys.key import OwnerKey
from pathmark.keys.safefile import exclusive, read_private, write_private

MAGIC: Final = "pathmark-key"
SCHEME_MAGIC: Final = "pathmark-scheme-key"
"""Of a key of another scheme than ours, in the same container."""
_OTHERS: Final = {
    MAGIC: "a key of PathMark's own, which goes without --scheme",
    SCHEME_MAGIC: "the key of another scheme, which --scheme names",
}
SCRYPT_N: Final = 1 << 17
"""Cost of one guess of the passphrase: 128 MiB and about half a second."""
_SCRYPT_R: Final = 8
_SCRYPT_P: Final = 1
_MAX_SCRYPT_BYTES: Final = 1 << 29
_MAX_HEADER: Final = 4096
_CHECK_LABEL: Final = b"pathmark passphrase check"

PassphraseSource = str | Callable[[], str] | None
"""A passphrase, a function that asks for one when it is needed, or None for PATHMARK_PASSPHRASE."""


def save_key(
    key: OwnerKey, path: Path | str, passphrase: str | None, *, plain: bool = False, scrypt_n: int = SCRYPT_N
) -> None:
    """Write a new key file, mode 0600; an existing file is never overwritten.

    `passphrase=None` is accepted only together with `plain=True`.
    """
    write_private(Path(path), seal(key, passphrase, plain=plain, scrypt_n=scrypt_n))


def load_key(path: Path | str, passphrase: PassphraseSource = None) -> OwnerKey:
    """Open a key file; its derivation is checked. Plain files need no passphrase."""
    return unseal(read_private(Path(path), "a key file"), passphrase, name=str(path))


def amend_key(
    path: Path | str, key: OwnerKey, passphrase: PassphraseSource = None, *, scrypt_n: int | None = None
) -> None:
    """Replace a key file by a later revision of the same key, in one step.

    Refuses if the file holds another key, or changed since `key` was loaded from it.
    """
    path = Path(path)
    phrase = _remembered(passphrase)
    with exclusive(path):
        data = read_private(path, "a key file")
        present = unseal(data, phrase, name=str(path))
        if present.secret != key.secret:
            raise KeyFileError(f"{path} holds key {present.fingerprint}, not {key.fingerprint}; nothing was written")
        if [w.id for w in present.watermarks] != [w.id for w in key.watermarks]:
            raise KeyFileError(f"{path} carries another id; save the licensee's key under its own name")
        if key.history[: len(present.history)] != present.history:
            raise KeyFileError(
                f"{path} is at revision {present.revision} and was amended by somebody else meanwhile; "
                "load it again and repeat"
            )
        header = _read_header(data, str(path))[0]
        plain = header["cipher"] == "none"
        cost = scrypt_n or (SCRYPT_N if plain else int(header["kdf"]["n"]))
        sealed = seal(key, None if plain else phrase(), plain=plain, scrypt_n=cost)
        write_private(path, sealed, replace=True)


def rotate_passphrase(
    path: Path | str, old: PassphraseSource, new: str | Callable[[], str], *, scrypt_n: int = SCRYPT_N
) -> OwnerKey:
    """Encrypt a key file with another passphrase, in one step; the key itself stays the same.

    The new passphrase is asked for only after the old one has opened the file. What somebody attached meanwhile
    is kept: the file is read again under the lock that amendments take.
    """
    path, phrase = Path(path), _remembered(old)
    load_key(path, phrase)
    fresh = _remembered(new)()
    with exclusive(path):
        key = load_key(path, phrase)
        write_private(path, seal(key, fresh, scrypt_n=scrypt_n), replace=True)
    return key


def is_plain(path: Path | str) -> bool:
    """Whether a key file is stored without encryption."""
    data = read_private(Path(path), "a key file")
    return bool(_read_header(data, str(path))[0]["cipher"] == "none")


def seal(key: OwnerKey, passphrase: str | None, *, plain: bool = False, scrypt_n: int = SCRYPT_N) -> bytes:
    """The bytes of a key file."""
    return seal_payload(_pack(key), passphrase, plain=plain, scrypt_n=scrypt_n)


def seal_payload(
    payload: bytes, passphrase: str | None, *, plain: bool = False, scrypt_n: int = SCRYPT_N, magic: str = MAGIC
) -> bytes:
    """The container around any payload; `magic` names what it holds."""
    if plain:
        header: Document = {
            "format": magic,
            "version": FORMAT_VERSION,
            "cipher": "none",
            "size": len(payload),
        }
        digest = sha256(canonical(header) + b"\n" + payload).hexdigest()
        return canonical({**header, "sha256": digest}) + b"\n" + payload
    if passphrase is None:
        raise KeyFileError("a key is stored encrypted: give a passphrase, or ask for a plain file explicitly")
    salt, nonce = secrets.token_bytes(16), secrets.token_bytes(12)
    kdf = {"name": "scrypt", "n": scrypt_n, "r": _SCRYPT_R, "p": _SCRYPT_P, "salt": salt.hex()}
    cipher_key, check = _stretch(passphrase, kdf)
    header = {
        "format": magic,
        "version": FORMAT_VERSION,
        "cipher": "aes-256-gcm",
        "kdf": kdf,
        "check": check.hex(),
        "nonce": nonce.hex(),
        "size": len(payload) + 16,
    }
    line = canonical(header)
    return line + b"\n" + AESGCM(cipher_key).encrypt(nonce, payload, line)


def unseal(data: bytes, passphrase: PassphraseSource, *, name: str = "this file") -> OwnerKey:
    """Inverse of seal()."""
    return _unpack(unseal_payload(data, passphrase, name=name), name)


def unseal_payload(data: bytes, passphrase: PassphraseSource, *, name: str, magic: str = MAGIC) -> bytes:
    """Inverse of seal_payload()."""
    header, line, body = _read_header(data, name, magic)
    if header["cipher"] == "none":
        if _given(passphrase):  # somebody may have put a plain key in the place of the one that the passphrase is for
            raise KeyFileError(
                f"{name} is not encrypted, and a passphrase was given; if you expect a plain key, add --plain or unset "
                "PATHMARK_PASSPHRASE"
            )
        stated = {k: v for k, v in header.items() if k != "sha256"}
        digest = sha256(canonical(stated) + b"\n" + body).hexdigest()
        if not hmac.compare_digest(digest, str(header.get("sha256"))):
            raise KeyFileError(f"{name} is damaged: its checksum does not match; restore it from a backup")
        return body
    cipher_key, check = _stretch(_remembered(passphrase)(), header["kdf"])
    if not hmac.compare_digest(check.hex(), header["check"]):
        raise KeyFileError(f"wrong passphrase for {name} (or its header is damaged)")
    payload = _decrypt(cipher_key, bytes.fromhex(header["nonce"]), body, line)
    if payload is None:
        raise KeyFileError(f"{name} is damaged: the passphrase is right but the content was altered; use a backup")
    return payload


def passphrase_from_environment(variable: str = "PATHMARK_PASSPHRASE") -> str:
    """The passphrase in the environment, or a KeyFileError that names the variable."""
    value = os.environ.get(variable)
    if not value:
        raise KeyFileError(f"a passphrase is needed: set {variable} or run in a terminal to be asked")
    return value


def no_passphrase() -> str:
    """A passphrase source for keys that are expected to be plain."""
    raise KeyFileError("this key is encrypted, and a plain one was asked for; leave --plain out")


def _given(source: PassphraseSource) -> bool:
    """Whether there is a passphrase without asking for it."""
    return isinstance(source, str) or (source is not no_passphrase and bool(os.environ.get("PATHMARK_PASSPHRASE")))


def _remembered(source: PassphraseSource) -> Callable[[], str]:
    """Ask at most once."""
    if source is no_passphrase:
        return no_passphrase
    if isinstance(source, str):
        return lambda: source
    ask = source or passphrase_from_environment
    answer: list[str] = []

    def once() -> str:
        if not answer:
            answer.append(ask())
        return answer[0]

    return once


def _stretch(passphrase: str, kdf: Document) -> tuple[bytes, bytes]:
    """Cipher key and passphrase check. The check only saves the user a riddle: GCM decides as well."""
    if not passphrase:
        raise KeyFileError("an empty passphrase protects nothing; choose another one")
    raw = unicodedata.normalize("NFC", passphrase).encode()
    made = Scrypt(salt=bytes.fromhex(kdf["salt"]), length=64, n=kdf["n"], r=kdf["r"], p=kdf["p"]).derive(raw)
    return made[:32], hmac.digest(made[32:], _CHECK_LABEL, "sha256")[:16]


def _decrypt(cipher_key: bytes, nonce: bytes, body: bytes, line: bytes) -> bytes | None:
    try:
        return AESGCM(cipher_key).decrypt(nonce, body, line)
    except (InvalidTag, ValueError):
        return None


def _read_header(data: bytes, name: str, magic: str = MAGIC) -> tuple[Document, bytes, bytes]:
    """Header, its bytes, and the body; every field is checked before anything is computed with it."""
    line, newline, body = data[:_MAX_HEADER].partition(b"\n")
    body = data[len(line) + 1 :]
    header = parse_object(line) if newline else None
    if header is None or header.get("format") != magic:
        other = None if header is None else _OTHERS.get(str(header.get("format")))
        raise KeyFileError(
            f"{name} is {other}; expected format {magic}"
            if other
            else f"{name} is not a key file, or its beginning is damaged; expected format {magic}"
        )
    version = header.get("version")
    if type(version) is int and version > FORMAT_VERSION:
        raise KeyFileError(
            f"{name} has key format {version}, this program knows up to {FORMAT_VERSION}; update pathmark"
        )
    if version != FORMAT_VERSION or canonical_or_none(header) != line or not _fields_fit(header):
        raise KeyFileError(f"{name} has a damaged header; restore it from a backup")
    if header["size"] != len(body):
        raise KeyFileError(
            f"{name} is {'truncated' if len(body) < header['size'] else 'too long'}: "
            f"expected {header['size']} bytes of content, got {len(body)}; restore it from a backup"
        )
    return header, line, body


def canonical_or_none(header: Document) -> bytes | None:
    """canonical(), or None for what it refuses."""
    try:
        return canonical(header)
    except TypeError:
        return None


def _fields_fit(header: Document) -> bool:
    """Types and bounds, so that a hostile header cannot cost memory or time."""
    if type(header.get("size")) is not int:
        return False
    if header.get("cipher") == "none":
        return set(header) == {"format", "version", "cipher", "size", "sha256"}
    kdf = header.get("kdf")
    names = {"format", "version", "cipher", "kdf", "check", "nonce", "size"}
    if header.get("cipher") != "aes-256-gcm" or set(header) != names or not isinstance(kdf, dict):
        return False
    if set(kdf) != {"name", "n", "r", "p", "salt"} or kdf["name"] != "scrypt":
        return False
    n, r, p = kdf["n"], kdf["r"], kdf["p"]
    if any(type(v) is not int or v < 1 for v in (n, r, p)) or n < 2 or n & (n - 1):
        return False
    if r > 32 or p > 4 or 128 * n * r > _MAX_SCRYPT_BYTES:
        return False
    return _is_hex(kdf["salt"], 16) and _is_hex(header["check"], 16) and _is_hex(header["nonce"], 12)


def _is_hex(value: object, size: int) -> bool:
    return isinstance(value, str) and len(value) == 2 * size and set(value) <= set("0123456789abcdef")


def _pack(key: OwnerKey) -> bytes:
    """Length of the record (u64), the record, then the attachments by name."""
    record = canonical(key.record())
    data = b"".join(key.attachments[name] for name in sorted(key.attachments))
    return struct.pack(">Q", len(record)) + record + data


def _unpack(payload: bytes, name: str) -> OwnerKey:
    """Inverse of _pack(). Unexpected content becomes a line without any of it."""
    reason = "its content is not a key record"
    try:
        (size,) = struct.unpack_from(">Q", payload)
        record = parse_object(payload[8 : 8 + size])
        if record is not None:
            return OwnerKey.from_record(record, _split(record, payload[8 + size :]))
    except KeyFileError as error:
        reason = str(error)
    except PathmarkError:
        reason = "its record contradicts itself"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error, OverflowError):
        reason = "its record has missing or malformed fields"
    raise KeyFileError(f"{name}: {reason}")


def _split(record: Document, data: bytes) -> dict[str, bytes]:
    sizes = {str(name): int(size) for _, name, _, size in record["history"]}
    found, place = {}, 0
    for name in sorted(sizes):
        found[name] = data[place : place + sizes[name]]
        place += sizes[name]
    if place != len(data):
        raise ValueError("attachments do not fill the payload")
    return found
