"""One byte string per document: the JSON form that is hashed, signed and authenticated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Document = dict[str, Any]
"""A JSON object of strings, integers, booleans, null, lists and objects; never a float."""


def canonical(document: Mapping[str, Any]) -> bytes:
    """ASCII JSON with sorted keys and no spaces. Floats are refused: their text form is not unique."""
    _refuse_floats(document)
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def parse_object(data: bytes) -> Document | None:
    """The JSON object in these bytes, or None. Returns instead of raising: errors carry their input."""
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse_floats(value: object) -> None:
    if isinstance(value, float):
        raise TypeError("canonical documents hold no floats")
    if isinstance(value, Mapping):
        for item in value.values():
            _refuse_floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_floats(item)
