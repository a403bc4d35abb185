"""What the beginning of a JSON file tells: an array or not, and the keys of its first objects.

Invariants: nothing is parsed as a whole, so a beginning that is cut anywhere will do; keys inside texts are not seen.
"""

import json
import re

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|["{}\[\]:,]', re.DOTALL)
BOM = b"\xef\xbb\xbf"


def is_array(head: bytes) -> bool:
    """Whether the first sign is a bracket."""
    return head.removeprefix(BOM).lstrip()[:1] == b"["


def first_keys(head: bytes, under: str | None = None) -> list[str]:
    """The keys of the first object, of the array if it begins with one; or of the first object of member ``under``."""
    found: list[str] = []
    wanted = 1 if under is None else 2
    depth = 0
    inside = under is None
    before = ""
    for match in TOKEN.finditer(head.decode("utf-8", "replace").removeprefix("\ufeff")):
        token = match[0]
        if token == '"':  # a text that is cut
            return found
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
            if inside and depth < wanted:
                return found
        elif token == ":" and depth == 1 and under is not None:
            inside = _name(before) == under
        elif token == ":" and depth == wanted and inside:
            found.append(_name(before))
        before = token
    return found


def first_key(head: bytes, under: str | None = None) -> str | None:
    """The first of ``first_keys``, with which all records of one writer begin."""
    return next(iter(first_keys(head, under)), None)


def _name(token: str) -> str:
    try:
        return str(json.loads(token))
    except ValueError:
        return token
