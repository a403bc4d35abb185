"""Text that any database, UTF-8 and JSON can hold.

Text that somebody else wrote, made harmless for a terminal or a page.

Invariants: what comes out holds no control character, no mark that turns the direction of text, nothing invisible and
no half of a character; each of them is shown by its name instead, so that nothing is hidden. Lengths are bounded, and
what is left out is counted. Not covered: look-alike letters, and markup, which is whoever shows the text's not to read.
"""

import json
import re
import unicodedata
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


LINE = 200  # characters of a field in one line
BLOCK = 20_000  # characters of a text of several lines
MARKS = 4  # combining marks that may follow one another: more of them climb over the lines above
PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421"}  # Unicode's control pictures
SUSPECT = re.compile(r"[^\x20-\x7e\u00a1-\u00ac\u00ae-\u02ff\u0370-\u0377\u038e-\u03a1\u03a3-\u052f\u4e00-\u9fff]")
BLANK = {"\u115f", "\u1160", "\u3164", "\uffa0", "\u2800"}  # letters by name that show nothing


def line(text: object, limit: int = LINE) -> str:
    """A text as one harmless line of at most ``limit`` characters, and how many were left out."""
    whole = str(text)
    shown = _shown(whole[:limit], keep="")
    return shown if len(whole) <= limit else f"{shown}… (+{len(whole) - limit:,} characters)"


def block(text: object, limit: int = BLOCK) -> str:
    """A text whose lines stay lines."""
    whole = str(text)
    shown = _shown(whole[:limit].replace("\r\n", "\n"), keep="\n")
    return shown if len(whole) <= limit else f"{shown}\n… {len(whole) - limit:,} more characters are not shown"


def _shown(text: str, keep: str) -> str:
    return _unpiled(SUSPECT.sub(lambda found: _name(found[0], keep), text))


def _unpiled(text: str) -> str:
    """At most ``MARKS`` combining marks one after the other."""
    if text.isascii():
        return text
    kept, marks = [], 0
    for sign in text:
        marks = marks + 1 if sign > "\u02ff" and unicodedata.category(sign) in ("Mn", "Me") else 0
        if marks <= MARKS:
            kept.append(sign)
    return "".join(kept)


def _name(sign: str, keep: str) -> str:
    if sign in keep:
        return sign
    code = ord(sign)
    if sign == "\t":
        return "    "
    if sign == "\n":
        return "\u23ce"
    if code in PICTURES:
        return PICTURES[code]
    category = unicodedata.category(sign)
    if category == "Cs":
        return "\ufffd"
    if category in ("Cc", "Cf", "Zl", "Zp", "Co", "Cn") or sign in BLANK:
        return f"\u2039U+{code:04X}\u203a"
    return " " if category == "Zs" else sign
