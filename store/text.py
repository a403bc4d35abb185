"""Text that any database, UTF-8 and JSON can hold."""

import json
from typing import Any

REPLACEMENT = "\ufffd"


def in_unicode(value: Any) -> Any:
    """A text, or all texts of a JSON value, with U+FFFD for each half of a character (a lone surrogate).

    JSON's escapes may hold such halves, and so may what a model or a customer sent; UTF-8 may not.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {in_unicode(key): in_unicode(item) for key, item in value.items()}
    return [in_unicode(item) for item in value] if isinstance(value, list | tuple) else value


def free(text: str) -> str:
    """A text of unknown origin as databases take it: U+FFFD for each NUL and each half of a character."""
    return str(in_unicode(text.replace("\0", REPLACEMENT)))


def cases(text: str) -> set[str]:
    """The ways of writing a text that a search tries: databases fold the case of ASCII letters only."""
    return {text.lower()} if text.isascii() else {text, text.lower(), text.upper(), text.title()}


def stored(text: str) -> str:
    """How JSON writes a text that stands in a string."""
    return json.dumps(text)[1:-1]
