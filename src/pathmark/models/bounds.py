"""What a config may say. Module objects and lists per layer cost time and memory even without weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pathmark.errors import ModelError

MAX_CONFIG_BYTES = 10_000_000
MAX_LAYERS, MAX_EXPERTS, MAX_WIDTH = 2_000, 65_536, 10_000_000
"""No released model comes near; a config beyond these is a mistake or a trap."""
MAX_ROUTES = 1 << 18
"""Layers times experts; ten times the largest released model."""
MAX_NUMBER = 10**12
"""Any other whole number."""
MAX_ENTRIES = 100_000
"""Entries of one list or table."""
MAX_COMPUTED = 1 << 28
"""Elements of tables that a model computes for itself, such as rotary angles per position."""

_LAYERS = frozenset({"num_hidden_layers", "num_layers", "n_layers", "n_layer"})
_EXPERTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"})
_WIDTHS = frozenset({"hidden_size", "d_model", "n_embd"})
_VOCABULARY = frozenset({"vocab_size"})
_COUNTS = _LAYERS | _EXPERTS | _WIDTHS | _VOCABULARY | {"num_attention_heads", "n_heads", "num_experts_per_tok"}
"""Fields that can only be natural numbers (or one per layer)."""


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse configs whose mere skeleton would not end."""
    for path, value in _walk(config, ""):
        field = path.rpartition(".")[2]
        if isinstance(value, list | dict) and len(value) > MAX_ENTRIES:
            raise ModelError(f"config has {len(value):,} entries in {path}; expected at most {MAX_ENTRIES:,}")
        for number in value if isinstance(value, list) else [value]:
            _check_number(path, field, number)
    for part in _objects(config):
        routes = _largest(part, _LAYERS) * _largest(part, _EXPERTS)
        if routes > MAX_ROUTES:
            raise ModelError(
                f"config asks for {routes:,} experts over all layers; expected at most {MAX_ROUTES:,}: "
                "broken or hostile"
            )


def check_against_files(config: Mapping[str, Any], elements: int) -> None:
    """Refuse configs that ask for more than the weight files hold, by what every decoder must store."""
    for part in _objects(config):
        width = _largest(part, _WIDTHS)
        for what, count in (
            ("an embedding", _largest(part, _VOCABULARY) * width),
            ("norms", _largest(part, _LAYERS) * width),
            ("a router", _largest(part, _EXPERTS) * width),
        ):
            if count > elements:
                raise ModelError(
                    f"config asks for {what} of {count:,} elements, the weight files hold {elements:,} in all; "
                    "expected the checkpoint's own config"
                )


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every field, in objects and in lists of objects."""
    if isinstance(value, Mapping):
        for field, inner in value.items():
            here = f"{path}.{field}" if path else str(field)
            yield here[:200], inner
            yield from _walk(inner, here)
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, Mapping | list):
                yield path[:200], inner
                yield from _walk(inner, path)


def _objects(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    yield from (value for _, value in _walk(config, "") if isinstance(value, Mapping))


def _check_number(path: str, field: str, value: Any) -> None:
    if field in _COUNTS and (isinstance(value, str | bool | dict) or (isinstance(value, int | float) and value < 0)):
        raise ModelError(f"config says {path} = {str(value)[:40]!r}; expected a natural number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if "layers" in field:
        bound = MAX_LAYERS
    elif "experts" in field:
        bound = MAX_EXPERTS
    elif field.endswith(("_size", "_dim", "_heads", "_rank")) or field in _COUNTS:
        bound = MAX_WIDTH
    elif isinstance(value, int):
        bound = MAX_NUMBER
    else:
        return
    if not math.isfinite(value) or value > bound:
        raise ModelError(f"config says {path} = {str(value)[:40]}; expected at most {bound}: broken or hostile")


def _largest(part: Mapping[str, Any], fields: frozenset[str]) -> int:
    """The largest value that any of the fields has, 0 without one."""
    values = [part.get(field) for field in fields]
    numbers = [n for value in values for n in (value if isinstance(value, list) else [value])]
    return max((int(n) for n in numbers if isinstance(n, int | float) and math.isfinite(n)), default=0)
