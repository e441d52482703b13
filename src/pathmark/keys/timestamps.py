"""What somebody else says of a commitment's date: RFC 3161 timestamps and OpenTimestamps proofs, checked offline.

The owner sends `timestamp_request` to a time-stamping authority, or the commitment's `statement` through `ots stamp`,
and attaches what comes back (`stamp`). Everybody else checks it with `existed_by`, against root certificates and block
headers that they chose themselves: a date counts only if it rests on what the reader trusts.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Final

from cryptography import x509

from pathmark.errors import KeyFileError
from pathmark.keys.commitment import Commitment
from pathmark.keys.opentimestamps import BlockHeader, check_proof, is_proof, load_headers, proven_times

MAX_BYTES: Final = 1 << 18
"""Largest answer that is read; one with its whole chain inside has a few kilobytes."""
_SEQUENCE, _CONTEXT_0 = 0x30, 0xA0


def timestamp_request(commitment: Commitment) -> bytes:
    """The request (.tsq) over this commitment, for any authority."""
    from rfc3161_client import HashAlgorithm, TimestampRequestBuilder

    builder = TimestampRequestBuilder().data(commitment.statement).hash_algorithm(HashAlgorithm.SHA256)
    request: bytes = builder.cert_request(cert_request=True).build().as_bytes()
    return request


Trusted = x509.Certificate | BlockHeader
"""What a reader lets a date rest on."""


def stamp(commitment: Commitment, answer: bytes) -> Commitment:
    """The commitment with an authority's answer (.tsr) or a proof (.ots), refused if it is over something else."""
    if is_proof(answer):
        check_proof(answer, sha256(commitment.statement).digest())
    else:
        _parse(commitment, answer)
    return replace(commitment, timestamps=(*commitment.timestamps, answer))


def existed_by(commitment: Commitment, trusted: Sequence[Trusted]) -> datetime.datetime | None:
    """The earliest moment by which this commitment existed, by an authority or a block that is trusted; None without.

    A timestamp that is there but does not rest on either counts as none: it may be the claimant's own.
    """
    roots = [each for each in trusted if isinstance(each, x509.Certificate)]
    headers = [each for each in trusted if isinstance(each, BlockHeader)]
    digest = sha256(commitment.statement).digest()
    moments = []
    for proof in filter(is_proof, commitment.timestamps if headers else ()):
        with contextlib.suppress(KeyFileError):
            moments += proven_times(proof, digest, headers)
    return min([*moments, *_stamped(commitment, roots)], default=None)


def _stamped(commitment: Commitment, roots: Sequence[x509.Certificate]) -> list[datetime.datetime]:
    """What authorities under these roots say."""
    from rfc3161_client import VerifierBuilder
    from rfc3161_client.errors import VerificationError

    moments = []
    for answer in commitment.timestamps if roots else ():
        try:
            response = _parse(commitment, answer)
            VerifierBuilder(roots=list(roots)).build().verify_message(response, commitment.statement)
        except (KeyFileError, VerificationError, ValueError):
            continue
        moments.append(response.tst_info.gen_time)
    return moments


def load_roots(path: Path) -> list[x509.Certificate]:
    """Root certificates in a PEM file."""
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise KeyFileError(f"{path} holds no certificates; expected a PEM file with the authority's root") from None
    return list(found)


def load_trusted(roots: str | os.PathLike[str] | None, headers: str | os.PathLike[str] | None) -> list[Trusted]:
    """Root certificates and block headers from the files that a reader names."""
    found: list[Trusted] = [] if roots is None else [*load_roots(Path(roots))]
    return found if headers is None else [*found, *load_headers(Path(headers))]


def load_answer(path: Path) -> bytes:
    """An authority's answer from a file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise KeyFileError(f"{path} is too large for a timestamp; expected at most {MAX_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None


def _parse(commitment: Commitment, answer: bytes):  # type: ignore[no-untyped-def]  # a class of the library's Rust half
    """The parsed answer, if it speaks of this commitment; a KeyFileError otherwise."""
    from rfc3161_client import decode_timestamp_response

    try:
        response = decode_timestamp_response(_in_order(answer[:MAX_BYTES]))
        said = response.tst_info.message_imprint.message
    except (ValueError, IndexError):
        raise KeyFileError("this is no RFC 3161 answer; expected the .tsr file of a time-stamping authority") from None
    if said != sha256(commitment.statement).digest():
        raise KeyFileError("this timestamp is over something else than this commitment")
    return response


def _in_order(answer: bytes) -> bytes:
    """The answer with the certificates inside it sorted, as DER asks of a set.

    Authorities that send their whole chain often do not sort it, and strict readers then refuse the answer. The order
    of certificates is not part of what is signed.
    """
    start, end = 0, len(answer)
    for tags in ((_SEQUENCE,), (None, _SEQUENCE), (None, _CONTEXT_0), (_SEQUENCE,), (None, None, None, _CONTEXT_0)):
        for tag in tags:
            if start >= end or (tag is not None and answer[start] != tag):
                return answer  # no certificates, or something that the reader refuses by itself
            inner, after = _content(answer, start)
            if tag is None:
                start = after
        start, end = inner, after
    certificates, place = [], start
    while place < end:
        after = _content(answer, place)[1]
        certificates.append(answer[place:after])
        place = after
    return answer[:start] + b"".join(sorted(certificates)) + answer[end:]


def _content(data: bytes, place: int) -> tuple[int, int]:
    """Where the content of the DER element at `place` begins and ends."""
    size, begin = data[place + 1], place + 2
    if size & 0x80:
        count = size & 0x7F
        size, begin = int.from_bytes(data[begin : begin + count], "big"), begin + count
    if begin + size > len(data):
        raise ValueError("an element is longer than its file")
    return begin, begin + size
