"""Safetensors headers, read with distrust: where each tensor lies, or one line about what is wrong.

A suspect's files are written by somebody else. Sizes are compared with the file before anything is read, and
nothing is allocated because a header says so.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathmark.errors import ModelError

MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own bound on its header."""
MAX_TENSORS = 500_000
"""Tensors in one file; DeepSeek-V3 has 92,000 in all of its 163 files."""
MAX_OFFSET = 1 << 48
MAX_JSON_DEPTH = 32
DTYPE_BITS = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Every type of the format."""
_KEPT = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a safetensors file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    end: int


def read_json(path: Path, limit: int) -> Any:
    """A JSON file of at most `limit` bytes and bounded depth; ValueError or OSError for everything else."""
    size = path.stat().st_size
    if size > limit:
        raise ModelError(f"{path} has {size:,} bytes; expected at most {limit:,}: broken or hostile")
    return parse_json(path.read_bytes())


def parse_json(text: bytes, *, unique: bool = False) -> Any:
    """JSON that nests no deeper than any real file; `unique` refuses objects that name a key twice."""
    if _depth(text) > MAX_JSON_DEPTH:
        raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:  # brackets inside strings may hide nesting from the count
        raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels") from None


def _depth(text: bytes) -> int:
    """Upper bound of the nesting; brackets inside strings count too, which no model's file comes near."""
    deepest = depth = 0
    # only brackets are left: the loop is over structure, not over the text
    for byte in text.translate(None, _NOT_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        if depth > deepest:
            deepest = depth
            if deepest > MAX_JSON_DEPTH:
                break
    return deepest


_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice[:80]!r} stands there twice")
    return found


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of one file, after checking that the header and the file agree to the byte."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{file} is truncated or not safetensors: {size} bytes, its header asks for {length + 8}")
        text = stream.read(length)
    if (count := text.count(b'"data_offsets"')) > MAX_TENSORS:
        raise ModelError(f"{file} names {count:,} tensors; expected at most {MAX_TENSORS:,}: broken or hostile")
    try:
        entries = parse_json(text, unique=True)
        if not isinstance(entries, dict):
            raise TypeError("expected a JSON object")
        entries.pop("__metadata__", None)
        stored = {name: _entry(file, name, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} has a damaged safetensors header: {_brief(error)}") from error
    _check_layout(file, stored, 8 + length, size)
    return stored


def _entry(file: Path, name: str, entry: Any, base: int) -> StoredTensor:
    if not isinstance(entry, dict) or not entry.keys() >= _KEPT:
        raise TypeError(f"{name[:80]!r} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPE_BITS:
        raise ValueError(f"{name[:80]!r} has dtype {str(dtype)[:20]!r}, which the format does not know")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2 or len(shape) > 16:
        raise ValueError(f"{name[:80]!r} has shape {str(shape)[:40]} and offsets {str(offsets)[:40]}")
    if any(type(n) is not int or not 0 <= n < MAX_OFFSET for n in (*shape, *offsets)):
        raise ValueError(f"{name[:80]!r} has a size or offset that is no natural number")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise ValueError(
            f"{name[:80]!r} of shape {shape} needs {bits / 8:g} bytes, its offsets give {offsets[1] - offsets[0]}"
        )
    return StoredTensor(file, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _check_layout(file: Path, stored: dict[str, StoredTensor], base: int, size: int) -> None:
    """Tensors follow each other without overlap or gap, from the header to the last byte."""
    expected = max((entry.end for entry in stored.values()), default=base)
    if size != expected:
        raise ModelError(f"{file} is truncated or padded: expected {expected} bytes, got {size}. Download it again")
    end = base
    for name, entry in sorted(stored.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            what = "overlaps another tensor" if entry.start < end else "follows a gap"
            raise ModelError(f"{file} has a damaged safetensors header: {name[:80]!r} {what}")
        end = entry.end


def _brief(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__
