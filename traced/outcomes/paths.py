"""Paths into JSON values: a small part of RFC 9535 (JSONPath).

    $.order.id    $['order']["a.b"]    $.items[0]    $.items[-1]    $.items[*].price    $.items.*    $

Invariants: a path gives values in the order of the document; where nothing is there it gives none, and never raises.
How it fails: ``ValueError`` for a text that is no such path, with the place. Not covered: slices, filters, ``..``,
several indices in one pair of brackets.
"""

import re
from collections.abc import Iterator
from typing import Any

Step = str | int | None  # a key, an index, or every one
Path = tuple[Step, ...]

_STEP = re.compile(
    r"""\.(?P<key>[^\W\d][\w-]*) | \[(?P<index>-?\d+)\] | (?P<every>\.\*|\[\*\])
      | \['(?P<single>(?:[^'\\]|\\.)*)'\] | \["(?P<double>(?:[^"\\]|\\.)*)"\]""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def parse_path(text: str) -> Path:
    """Read a path; raises ``ValueError``."""
    if not text.startswith("$"):
        raise ValueError(f'{text!r} is no path: it begins with "$", e.g. "$.order.status"')
    steps: list[Step] = []
    at = 1
    while at < len(text):
        found = _STEP.match(text, at)
        if found is None:
            raise ValueError(
                f'{text!r} is no path from character {at + 1} on: a step is .key, ["any key"], [0], [-1] or [*]'
            )
        steps.append(_step(found))
        at = found.end()
    return tuple(steps)


def values_at(path: Path, value: Any) -> Iterator[Any]:
    """The values that a path leads to."""
    if not path:
        yield value
        return
    step, rest = path[0], path[1:]
    for inner in _inner(step, value):
        yield from values_at(rest, inner)


def _step(found: re.Match[str]) -> Step:
    if found["every"]:
        return None
    if found["index"]:
        return int(found["index"])
    if found["key"]:
        return found["key"]
    return _ESCAPED.sub(r"\1", found["single"] if found["single"] is not None else found["double"])


def _inner(step: Step, value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        if step is None:
            yield from value.values()
        elif isinstance(step, str) and step in value:
            yield value[step]
    elif isinstance(value, list):
        if step is None:
            yield from value
        elif isinstance(step, int) and -len(value) <= step < len(value):
            yield value[step]
