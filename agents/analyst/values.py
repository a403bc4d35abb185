"""Reads JSON arguments and results: leaves with their paths, sibling records, and the first mention of each word.

A path joins keys with dots and writes ``[]`` for list elements ("flights[].date").
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from agents.analyst.language import WORD
from agents.transcript import Transcript

ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_CODE = re.compile(r"(?=\w*\d)[A-Za-z][\w-]*")
_NAMING_FIELD = re.compile(r"(^|_|\.)(id|ids|name|title|label|number|code|key)$", re.IGNORECASE)


@dataclass(frozen=True)
class Record:
    """One of several sibling records: the values that name the record (``handles``) and the fields that describe it."""

    handles: frozenset[str]
    fields: dict[str, object]


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield every leaf of a JSON value with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, f"{path}[]")
    else:
        yield path, value


def siblings(value: object) -> Iterator[list[Record]]:
    """Yield every group of two or more sibling records: the objects of a list, or of an object whose keys are codes.

    Siblings have at least one field in common. A list inside a list is one alternative made of parts (the legs of a
    journey), so its parts are no siblings.
    """
    if isinstance(value, list):
        items = [(None, item) for item in value if isinstance(item, dict)]
        inner: list[object] = [item for item in value if not isinstance(item, list)]
    elif isinstance(value, dict):
        items = [(key, item) for key, item in value.items() if isinstance(item, dict) and _CODE.fullmatch(str(key))]
        inner = list(value.values())
    else:
        return
    if len(items) >= 2 and set.intersection(*(set(item) for _, item in items)):
        yield _records([(key, dict(leaves(item))) for key, item in items])
    for item in inner:
        yield from siblings(item)


def _records(rows: list[tuple[str | None, dict[str, object]]]) -> list[Record]:
    """Return the records of rows of (key, fields).

    A field names its record if its key says so (an id, a title) or if it holds a different code in every sibling.
    """
    paths = sorted({path for _, fields in rows for path in fields})
    naming_paths = {
        path
        for path in paths
        if _NAMING_FIELD.search(path) or _distinct_codes([fields.get(path) for _, fields in rows])
    }
    return [
        Record(
            handles=frozenset(
                {str(fields[path]) for path in naming_paths if fields.get(path) is not None} | ({key} if key else set())
            ),
            fields={path: value for path, value in fields.items() if path not in naming_paths},
        )
        for key, fields in rows
    ]


def _distinct_codes(values: list[object]) -> bool:
    codes = [value for value in values if isinstance(value, str) and _CODE.fullmatch(value) and not is_date(value)]
    return len(codes) == len(values) == len(set(codes))


def is_date(value: object) -> bool:
    """Return whether a value is an ISO date."""
    return isinstance(value, str) and bool(ISO_DATE.fullmatch(value))


def tokens(value: object) -> list[str]:
    """Return the lower-case words of a value's text."""
    return WORD.findall(str(value).lower())


def first_seen(conversation: Transcript) -> dict[str, int]:
    """Return, for each word of the system prompt, the user and the observations, the index of its first message.

    The agent's own messages are not a source. The system prompt has index -1.
    """
    first_index: dict[str, int] = dict.fromkeys(tokens(conversation.system), -1)
    texts = [(message.index, message.text) for message in conversation.user]
    texts += [(call.result.index, call.result.text) for call in conversation.calls if call.result is not None]
    for index, text in sorted(texts):
        for word in set(tokens(text)):
            first_index.setdefault(word, index)
    return first_index


def grounded(value: object, index: int, first_index: dict[str, int]) -> bool:
    """Return whether every word of ``value`` appeared in a source of ``first_seen`` before message ``index``."""
    return all(first_index.get(word, index) < index for word in tokens(value))
