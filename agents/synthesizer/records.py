"""Reading recorded values: the leaves of a record, and what kind of value a leaf is.

Invariants: a path is the tool's name and the keys down to the leaf, list positions and identifier keys left out, so
that the same field of different records has the same path. Numbers are named by their JSON text ("35", "158.5").
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from typing import Any

Path = tuple[str, ...]

IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z_]*\d\w{0,38}")
DATE = re.compile(r"(?<!\d)\d{4}-\d{2}-\d{2}(?!\d)")
NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w-]|\.\d)")
_NAME = re.compile(r"[A-Za-z][A-Za-z' -]{1,38}[A-Za-z]")


def leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Every scalar of nested data with its path; identifier keys of a mapping count as leaves at ``(*path, "*")``."""
    if isinstance(value, dict):
        for key, part in value.items():
            named = is_identifier(key)
            if named:
                yield (*path, "*"), key
            yield from leaves(part, (*path, "*" if named else str(key)))
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, path)
    else:
        yield path, value


def is_identifier(value: Any) -> bool:
    """A code of letters and digits that starts with a letter, such as W1234 or credit_card_17."""
    return isinstance(value, str) and IDENTIFIER.fullmatch(value) is not None


def is_name(value: Any) -> bool:
    """A word or short phrase that could name a thing; codes in capitals (airports) are not names."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None and not value.isupper()


def is_number(value: Any) -> bool:
    """A number, booleans excluded."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def has_word(text: str, word: str) -> bool:
    """``word`` stands in ``text`` as a whole word, case ignored."""
    if word.lower() not in text.lower():
        return False
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def days_of(text: str) -> list[date]:
    """The ISO dates of a text that are days of the calendar, in order of appearance."""
    found = []
    for part in DATE.findall(text):
        with suppress(ValueError):
            found.append(date.fromisoformat(part))
    return found


def shape(identifier: str) -> str:
    """Letters kept, digits masked: W1234 is W####."""
    return re.sub(r"\d", "#", identifier)


def style_of(text: str, value: Any) -> str:
    """How a tool writes its JSON: "compact", "spaced", or "text" where it cannot be written again byte for byte."""
    if not isinstance(value, dict | list):
        return "text"
    if json.dumps(value, separators=(",", ":"), ensure_ascii=False) == text:
        return "compact"
    return "spaced" if json.dumps(value, ensure_ascii=False) == text else "text"


def sentences(text: str) -> list[str]:
    """Sentences, split after a full stop, question mark or exclamation mark."""
    return [part for part in re.split(r"(?<=[.?!])\s+", text.strip()) if part]


def masked(text: str) -> str:
    """A text with identifiers, dates and numbers masked, in lower case: what recurs between conversations."""
    return re.sub(r"\b\w*\d[\w-]*", "#", text).lower()
