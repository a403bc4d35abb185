"""Taking secrets out of whatever is about to be written down.

A secret is known by its place: the value of a key that is named for one (``db_password``, ``apiKey``, ``X-Auth-Token``;
``max_tokens``, ``token_ids`` and ``secret_file`` are not), what follows such a name and ``=`` or ``:`` in a text, or an
option of that name, what follows the word Bearer, and the password in a URL (over http, anything before the ``@``).

Invariants: ``redacted`` gives JSON values only (other objects become their redacted ``str``), so that nothing that is
done afterwards can bring a secret back. Where it is unsure it takes out too much rather than too little. Texts are cut
at ``LONGEST``.
Fails: never. Not covered: a secret that nothing around it gives away, one spread over several values, and one that
holds a quotation mark inside JSON inside JSON.
"""

import math
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

GONE = "[redacted]"
LONGEST = 32_768  # characters
DEEPEST = 32

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


def redacted(value: Any, depth: int = 0) -> Any:
    """``value`` as JSON values without its secrets."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return redacted_text(value)
    if depth >= DEEPEST:
        return "..."
    if isinstance(value, Mapping):
        return {redacted_text(str(key)): _under(str(key), item, depth + 1) for key, item in value.items()}
    if isinstance(value, Set):
        return [redacted(item, depth + 1) for item in value]
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return _items(value, depth + 1)
    return redacted_text(_text(value))


def redacted_text(text: str) -> str:
    """``text`` without the secrets that its own wording gives away."""
    cut = text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"
    cut = _USER.sub(rf"\1{GONE}@", _PASSWORD.sub(rf"\1{GONE}@", cut))
    return _BEARER.sub(rf"\1{GONE}", _without_assigned(cut))


def redacted_lines(text: bytes) -> bytes:
    """Whole lines without their secrets; what holds nothing that could be one goes through as it is, byte for byte."""
    if not _SUSPECT.search(text):
        return text
    return b"".join(_redacted_line(line) if _SUSPECT.search(line) else line for line in text.splitlines(keepends=True))


def _redacted_line(line: bytes) -> bytes:
    text = line.rstrip(b"\r\n")
    end = line[len(text) :]
    return redacted_text(text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape") + end


def is_secret_name(name: str) -> bool:
    """Whether a key, variable, header or option of this name holds a secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    if words[-1] in ("key", "keys"):
        return len(words) > 1 and words[-2] in _SECRET_KEYS
    return words[-1] in _SECRET_WORDS or words[-1].endswith(_ENDINGS)


def _under(key: str, value: Any, depth: int) -> Any:
    if not is_secret_name(key) or value is None or isinstance(value, bool) or value in ("", b""):
        return redacted(value, depth)
    return GONE


def _items(values: Sequence[Any], depth: int) -> list[Any]:
    """The items; one that comes after a secret's name, in a pair or as the value of an option, is a secret."""
    result = []
    named = False
    for index, item in enumerate(values):
        result.append(GONE if named and isinstance(item, str | bytes) else redacted(item, depth))
        text = _text(item) if isinstance(item, str | bytes) else ""
        pair = len(values) == 2 and index == 0
        named = (pair or text.startswith("-")) and "=" not in text and is_secret_name(text)
    return result


def _without_assigned(text: str) -> str:
    parts, at = [], 0
    for found in _NAME.finditer(text):
        if found.start() < at or not is_secret_name(found["name"]):
            continue
        if found["after"].isspace() and not found["name"].startswith("-"):
            continue
        value = _VALUE.match(text, found.end())
        end = value.end() if value else found.end()
        if end > found.end():
            parts += [text[at : found.end()], GONE]
            at = end
    return "".join([*parts, text[at:]])


def _text(value: Any) -> str:
    try:
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    except Exception as error:  # somebody else's __str__: a log line must not fail for it
        return f"<{type(value).__name__} whose text cannot be made: {type(error).__name__}>"
