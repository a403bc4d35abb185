"""Removal of secrets from values and texts before they are logged or stored.

A secret is recognised by its context: the value of a key with a secret's name (``db_password``, ``apiKey``,
``X-Auth-Token``, but not ``max_tokens``, ``token_ids`` or ``secret_file``), the text after such a name and ``=`` or
``:``, the value of such an option, the text after "Bearer", and the password in a URL (over http, anything before the
``@``). When in doubt, the text is removed. Not covered: secrets without such a context, spread over several values, or
with a quotation mark inside nested JSON.
"""

import math
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

REDACTED = "[redacted]"
MAX_CHARACTERS = 32_768
MAX_DEPTH = 32

_ENDINGS = ("token", "password", "passwd", "passphrase", "secret", "apikey", "authorization", "cookie", "credential")
_SECRET_WORDS = {"auth", "pwd", "passwords", "secrets", "cookies", "credentials"}
_SECRET_KEYS = {"api", "private", "access", "signing", "secret", "auth"}  # ... followed by "key"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SCHEMES = "(?:bearer|basic|digest|negotiate|token)"
_NAME = re.compile(r"(?<![\w.-])(?P<name>[\w.-]++)(?P<after>\\*[\"']?\]?\s{0,8}[:=]\s{0,8}|\s{1,8})")
_VALUE = re.compile(
    rf"b?(?P<quote>\\*[\"'])(?:(?!(?P=quote))(?:\\.|[^\\]))*(?P=quote)|(?:\\*[\"'])?(?:{_SCHEMES}\s+)?\S*",
    re.IGNORECASE | re.DOTALL,
)
_BEARER = re.compile(r"\b(bearer\s{1,8})[^\s\"',;]+", re.IGNORECASE)
_PASSWORD = re.compile(r"(?<![\w+.-])([\w+.-]++://[^\s:/@]*+:)(?!\d+(?:[/\s\"']|$))[^\s\"<>]*@")
_USER = re.compile(r"(?<![\w+.-])(https?://)[^\s\"<>/@:]+@", re.IGNORECASE)

_SUSPECT = re.compile(rb"token|pass|secret|key|auth|cookie|credential|pwd|bearer|://", re.IGNORECASE)


def redacted(value: object, depth: int = 0) -> Any:
    """Return the value without secrets, as JSON values; other objects become their redacted ``str``."""
    # Only JSON values: an object could print its secret when it is rendered later.
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return redacted_text(value)
    if depth >= MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {redacted_text(str(key)): _redact_value(str(key), item, depth + 1) for key, item in value.items()}
    if isinstance(value, Set):
        return [redacted(item, depth + 1) for item in value]
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return _redact_items(value, depth + 1)
    return redacted_text(_text(value))


def redacted_text(text: str) -> str:
    """Return the text without secrets, cut at ``MAX_CHARACTERS``."""
    cleaned = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}... ({len(text)} characters)"
    cleaned = _USER.sub(rf"\1{REDACTED}@", _PASSWORD.sub(rf"\1{REDACTED}@", cleaned))
    return _BEARER.sub(rf"\1{REDACTED}", _redact_assignments(cleaned))


def redacted_lines(text: bytes) -> bytes:
    """Return complete lines without secrets; lines without a suspicious word are unchanged byte for byte."""
    if not _SUSPECT.search(text):
        return text
    return b"".join(_redacted_line(line) if _SUSPECT.search(line) else line for line in text.splitlines(keepends=True))


def _redacted_line(line: bytes) -> bytes:
    text = line.rstrip(b"\r\n")
    end = line[len(text) :]
    return redacted_text(text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape") + end


def is_secret_name(name: str) -> bool:
    """Whether a key, variable, header or option with this name has a secret value."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    if words[-1] in ("key", "keys"):
        return len(words) > 1 and words[-2] in _SECRET_KEYS
    return words[-1] in _SECRET_WORDS or words[-1].endswith(_ENDINGS)


def _redact_value(key: str, value: object, depth: int) -> object:
    if not is_secret_name(key) or value is None or isinstance(value, bool) or value in ("", b""):
        return redacted(value, depth)
    return REDACTED


def _redact_items(values: Sequence[object], depth: int) -> list[object]:
    """Redact items, including one that follows a secret's name in a pair or as the value of an option."""
    result = []
    after_secret_name = False
    for index, item in enumerate(values):
        result.append(REDACTED if after_secret_name and isinstance(item, str | bytes) else redacted(item, depth))
        text = _text(item) if isinstance(item, str | bytes) else ""
        pair = len(values) == 2 and index == 0
        after_secret_name = (pair or text.startswith("-")) and "=" not in text and is_secret_name(text)
    return result


def _redact_assignments(text: str) -> str:
    parts, position = [], 0
    for name_match in _NAME.finditer(text):
        if name_match.start() < position or not is_secret_name(name_match["name"]):
            continue
        if name_match["after"].isspace() and not name_match["name"].startswith("-"):
            continue
        value = _VALUE.match(text, name_match.end())
        end = value.end() if value else name_match.end()
        if end > name_match.end():
            parts += [text[position : name_match.end()], REDACTED]
            position = end
    return "".join([*parts, text[position:]])


def _text(value: object) -> str:
    try:
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    except Exception as error:
        # A foreign __str__ may raise anything, and a log line must not fail because of it.
        return f"<{type(value).__name__} whose __str__ failed: {type(error).__name__}>"
