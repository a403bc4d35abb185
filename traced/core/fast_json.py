"""JSON at the router's pace: orjson, and Python's own where orjson refuses what clients and engines may send.

Those are lone surrogates, NaN, encodings other than UTF-8, and integers of more than 64 bits when writing. Invariant:
what is written depends on the value alone. Fails: ``ValueError`` and ``RecursionError``, as ``json`` does.
Not covered: integers of more than 64 bits are read as floats.
"""

import json
from typing import Any

import orjson


def read_json(raw: bytes | str) -> Any:
    """The value of a JSON text."""
    try:
        return orjson.loads(raw)
    except ValueError:
        return json.loads(raw)


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested in more than so many levels."""
    level = [value]
    for _ in range(levels + 1):
        level = [item for one in level for item in _items(one) if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def write_json(value: Any, *, sort: bool = False) -> bytes:
    """A JSON text on one line; with ``sort`` the keys of its objects are sorted."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort else None)
    except TypeError:
        return json.dumps(value, sort_keys=sort, separators=(",", ":")).encode()
