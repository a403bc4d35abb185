"""The JSON object in a model's answer: prose around it, code fences, thoughts before it, commas too many.

Invariants: nothing is guessed. An object is taken where the answer holds exactly one, as it stands or without trailing
commas; two keys of the same name, NaN and infinities are no JSON. How it fails: ``Unreadable`` says why, in words for
the model. Not covered: single quotes, comments, objects that are cut off: those go back.
"""

import json
import re
from typing import Any

THOUGHTS = re.compile(r"\A\s*<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL)
OPENING = re.compile(r'\{\s*["}]')  # of an object, not of a set in prose
STRING_OR_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])', re.DOTALL)
LONGEST = 4_000_000  # characters


class Unreadable(ValueError):
    """There is not exactly one JSON object in the answer."""


def object_in(answer: str) -> dict[str, Any]:
    """The one JSON object of an answer."""
    if len(answer) > LONGEST:
        raise Unreadable(f"the answer has {len(answer)} characters, which is too long")
    told = THOUGHTS.sub("", answer, count=1).strip()
    opening = OPENING.search(told)
    if opening is None or told.startswith("["):
        raise Unreadable("there is no JSON object in the answer")
    told = told[opening.start() :]
    try:
        found = _objects(told)
    except Unreadable:
        found = _objects(STRING_OR_COMMA.sub(lambda matched: matched.group(1) or "", told))
    if len(found) > 1:
        raise Unreadable(f"there are {len(found)} JSON objects in the answer; give one")
    return found[0]


def _objects(text: str) -> list[dict[str, Any]]:
    """The objects of a text that begins with one; what is inside of one that cannot be read is not looked for."""
    found = []
    opening = OPENING.search(text)
    while opening is not None:
        try:
            value, end = DECODER.raw_decode(text, opening.start())
        except RecursionError:
            raise Unreadable("the JSON is nested too deeply") from None
        except ValueError as error:
            raise Unreadable(f"the JSON cannot be read: {error}") from None
        found.append(value)
        opening = OPENING.search(text, end)
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key!r} is there twice")
        made[key] = value
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_constant)
