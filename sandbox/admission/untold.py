"""What the oracle uses that nothing before it tells: codes that nobody could know, and what an agent works out.

A code is refused: a word of letters and digits, a text of digits, a date where none was read, and whatever an argument
that is named like an identifier (``order_id``, ``code``, ``password``) holds. A number and a plain word may be worked
out - the middle between two bounds, what an order comes to, a word that was deciphered - and is told as a figure alone;
so is a number in words, and a text of digits whose argument is named like a quantity (``total``, ``answer``). Neither
is meant where one simple step leads to the value (``known.py``).
Not covered: hidden numbers and plain words, which look like those that are worked out, choices among few offered values
by a hidden coin, for every one of them was read; and codes that must be deciphered, which are called unknown.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sandbox.admission.known import Known, leaves
from sandbox.contract import Message
from sandbox.wire import OraclePlay

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_IDENTIFIER = re.compile(
    r"(?:^|_)(?:ids?|uid|uuid|guid|codes?|pin|token|pass(?:word|code|phrase)|secret|serial|sku|iban|account|phone)(?:_|$)"
    r"|(?:order|account|ticket|invoice|case|customer|client|phone|card|room|flight|booking|reference|tracking|member"
    r"|policy|contract|record|document)_(?:number|no|nr|num)(?:_|$)"
)
_QUANTITY = re.compile(
    r"(?:^|_)(?:total|sum|amounts?|prices?|costs?|fees?|tax|balance|cents|euros|dollars|counts?|quantity|pieces"
    r"|results?|answers?|values?|average|mean|median|difference|share|rate|distance|weight|length|width|height|size"
    r"|days|hours|minutes|seconds|guess)(?:_|$)"
)
_MEASURE = re.compile(r"-?[\d.,:]+(?:kg|g|mg|ml|l|cm|mm|m|km|h|min|s|eur|usd|x|st|nd|rd|th)?", re.IGNORECASE)
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?.*")


@dataclass(frozen=True)
class Untold:
    """What of one episode nothing tells, each in words."""

    codes: list[str] = field(default_factory=list)
    worked_out: list[str] = field(default_factory=list)


def untold(one: OraclePlay) -> Untold:
    """What the oracle's arguments and words hold beyond what an agent has read by then."""
    known = Known()
    known.read(one.task.system)
    known.read(json.dumps(one.task.tools, ensure_ascii=False))
    for message in one.task.messages:
        known.read(str(message.get("content") or ""))
    found = Untold()
    for turn in one.turns:
        for text, is_code in _strange(turn.message, known):
            (found.codes if is_code else found.worked_out).append(text)
        for reply in turn.replies:
            known.read(str(reply.get("content") or ""))
    return found


def _strange(message: Message, known: Known) -> Iterator[tuple[str, bool]]:
    """What is not explained, and whether it is a code."""
    for call in message.get("tool_calls") or []:
        tool = call["function"]["name"]
        for name, value in leaves(_parsed(call["function"]["arguments"])):
            if not known.explains(value):
                yield f"{name}={json.dumps(value, ensure_ascii=False)} in {tool}", _is_code(name, value, known)
    for word in known.strangers(str(message.get("content") or "")):
        yield f"{word} in the oracle's words", not _MEASURE.fullmatch(word)


def _is_code(name: str, value: Any, known: Known) -> bool:
    """Whether nobody could work this out."""
    snake = _CAMEL.sub("_", name).lower()
    if _IDENTIFIER.search(snake):
        return True
    if not isinstance(value, str):
        return False
    words = list(known.strangers(value))
    alone = not _QUANTITY.search(snake) and words == [value.strip()]
    return any(_DATE.fullmatch(word) or not _MEASURE.fullmatch(word) or (alone and word.isdigit()) for word in words)


def _parsed(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
