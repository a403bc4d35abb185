"""Make text from untrusted sources storable in databases and JSON, and safe to show in a terminal or a web page.

Sanitized text has no control characters, bidirectional controls, invisible characters or lone surrogates: each is
replaced by a visible form. A text over the length limit is cut, and the number of omitted characters is appended. Not
covered: look-alike letters, and markup, which the renderer must escape.
"""

import json
import re
import unicodedata
from typing import Any

REPLACEMENT = "\ufffd"
LINE = 200  # characters
BLOCK = 20_000  # characters
# Combining marks in a row that are kept; a longer stack would cover the lines above.
MAX_MARKS = 4
CONTROL_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421"}
# Characters outside these common ranges are looked up by Unicode category; skipping the common ones is faster.
UNSAFE = re.compile(r"[^\x20-\x7e\u00a1-\u00ac\u00ae-\u02ff\u0370-\u0377\u038e-\u03a1\u03a3-\u052f\u4e00-\u9fff]")
# Characters without a visible glyph whose Unicode category is that of a letter or symbol.
INVISIBLE_LETTERS = {"\u115f", "\u1160", "\u3164", "\uffa0", "\u2800"}


def signature(person: str, on_behalf_of: str = "") -> str:
    """Return the name of an authenticated person and of whom they act for: "root, on behalf of ann"."""
    return f"{person}, on behalf of {on_behalf_of}" if on_behalf_of else person


def replace_surrogates(value: Any) -> Any:
    """Return a JSON value with U+FFFD in place of each lone surrogate in its keys and texts."""
    # JSON escapes from models and clients may contain lone surrogates, which UTF-8 cannot encode.
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {replace_surrogates(key): replace_surrogates(item) for key, item in value.items()}
    return [replace_surrogates(item) for item in value] if isinstance(value, list | tuple) else value


def storable_text(text: str) -> str:
    """Return the text with U+FFFD in place of each NUL and lone surrogate, which databases reject."""
    return str(replace_surrogates(text.replace("\0", REPLACEMENT)))


def case_variants(text: str) -> set[str]:
    """Return the spellings that a case-insensitive search must try: databases fold the case of ASCII letters only."""
    return {text.lower()} if text.isascii() else {text, text.lower(), text.upper(), text.title()}


def json_escaped(text: str) -> str:
    """Return the text escaped as inside a JSON string, without the quotes."""
    return json.dumps(text)[1:-1]


def sanitize_line(text: object, limit: int = LINE) -> str:
    """Return the first ``limit`` characters as one sanitized line, followed by the number of omitted characters."""
    full_text = str(text)
    sanitized = _sanitize(full_text[:limit], allowed="")
    return sanitized if len(full_text) <= limit else f"{sanitized}… (+{len(full_text) - limit:,} characters)"


def sanitize_block(text: object, limit: int = BLOCK) -> str:
    """Return the first ``limit`` characters as sanitized lines, followed by the number of omitted characters."""
    full_text = str(text)
    sanitized = _sanitize(full_text[:limit].replace("\r\n", "\n"), allowed="\n")
    return (
        sanitized
        if len(full_text) <= limit
        else f"{sanitized}\n… {len(full_text) - limit:,} more characters are not shown"
    )


def _sanitize(text: str, allowed: str) -> str:
    return _limit_marks(UNSAFE.sub(lambda match: _visible_form(match[0], allowed), text))


def _limit_marks(text: str) -> str:
    if text.isascii():
        return text
    characters, mark_count = [], 0
    for character in text:
        is_mark = character > "\u02ff" and unicodedata.category(character) in ("Mn", "Me")
        mark_count = mark_count + 1 if is_mark else 0
        if mark_count <= MAX_MARKS:
            characters.append(character)
    return "".join(characters)


def _visible_form(character: str, allowed: str) -> str:
    if character in allowed:
        return character
    code = ord(character)
    if character == "\t":
        return "    "
    if character == "\n":
        return "\u23ce"
    if code in CONTROL_PICTURES:
        return CONTROL_PICTURES[code]
    category = unicodedata.category(character)
    if category == "Cs":
        return REPLACEMENT
    if category in ("Cc", "Cf", "Zl", "Zp", "Co", "Cn") or character in INVISIBLE_LETTERS:
        return f"\u2039U+{code:04X}\u203a"
    return " " if category == "Zs" else character
