"""Fast JSON: orjson, with the standard library for what orjson rejects.

orjson rejects lone surrogates, NaN, encodings other than UTF-8, and (when writing) integers of more than 64 bits, all
of which clients and engines may send. Integers of more than 64 bits are read as floats.
"""

import json
from collections.abc import Iterable
from typing import Any

import orjson


def read_json(raw: bytes | str) -> Any:
    """Parse a JSON text; raises ``ValueError`` or ``RecursionError``."""
    try:
        return orjson.loads(raw)
    except ValueError:
        return json.loads(raw)


def exceeds_depth(value: object, levels: int) -> bool:
    """Whether lists and objects are nested in more than ``levels`` levels."""
    # Level by level instead of recursively: the value may be nested deeper than Python's stack allows.
    containers = [value]
    for _ in range(levels + 1):
        containers = [item for container in containers for item in _items(container) if isinstance(item, dict | list)]
        if not containers:
            return False
    return True


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def write_json(value: object, *, sort: bool = False) -> bytes:
    """Write a value as JSON on one line, with sorted keys if ``sort`` is set."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort else None)
    except TypeError:
        return json.dumps(value, sort_keys=sort, separators=(",", ":")).encode()
