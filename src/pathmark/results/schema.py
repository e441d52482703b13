"""Frozen dataclasses as JSON and back. What is read has every field and no other, each of its type.

Fields may be numbers, text, flags, None, Literals, tuples, mappings with text keys, dataclasses and unions of these;
dataclasses in a union tell themselves apart by the Literal in their field `status`. Round trip:
`from_json(type(x), to_json(x)) == x`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pathmark.errors import ResultError

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """JSON value of a result."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[T], value: Any, where: str = "it") -> T:
    """A dataclass from its JSON object, or a refusal that names the field."""
    found = _read(kind, value, where)
    assert isinstance(found, kind)
    return found


def _read(kind: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return _read(_chosen(args, value, where), value, where)
    if origin is Literal:
        _require(any(value == item and type(value) is type(item) for item in args), where, " or ".join(map(str, args)))
        return value
    if origin is tuple:
        _require(isinstance(value, list), where, "a list")
        return tuple(_read(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is not None:
        _require(isinstance(value, dict), where, "an object")
        return {name: _read(args[1], item, f"{where}.{name}") for name, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    if kind is float:
        _require(type(value) in (int, float) and not math.isnan(value), where, "a number")
        return float(value)
    _require(type(value) is kind, where, {int: "a whole number", str: "text", bool: "true or false"}.get(kind, "null"))
    return value


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    _require(isinstance(value, dict), where, "an object")
    names = [field.name for field in dataclasses.fields(kind)]
    for name in (*names, *value):
        _require(name in value, where, f"the field {name}")
        _require(name in names, where, f"no field {name}")
    hints = get_type_hints(kind)
    try:
        return kind(**{name: _read(hints[name], value[name], f"{where}.{name}") for name in names})
    except ResultError:
        raise
    except ValueError as error:  # the type's own check
        raise ResultError(f"{where}: {error}") from error


def _chosen(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """Which type of a union a value is meant to have."""
    if value is None and type(None) in kinds:
        return type(None)
    left = [kind for kind in kinds if kind is not type(None)]
    if len(left) > 1 and all(dataclasses.is_dataclass(kind) for kind in left):
        status = value.get("status") if isinstance(value, dict) else None
        known = {name: kind for kind in left for name in get_args(get_type_hints(kind)["status"])}
        _require(status in known, f"{where}.status", " or ".join(known))
        return known[status]
    return next((kind for kind in left if type(value) is kind), left[0])


def _require(fine: bool, where: str, expected: str) -> None:
    if not fine:
        raise ResultError(f"{where}: expected {expected}")
