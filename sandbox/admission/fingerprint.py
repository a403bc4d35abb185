"""How alike two task instances are, once what merely names things is masked.

``exact`` is everything the agent and the oracle see and do. ``shape`` masks values (ids, numbers, dates, names, and
every word that also stands in a tool call's arguments or a tool's answer) and keeps wording, order and tool use: two
seeds of one shape differ in parameters alone. Pure functions.
"""

import hashlib
import json
import re
from typing import Any

from sandbox.wire import OraclePlay

_WORD = re.compile(r"[\w'-]+")


def exact(play: OraclePlay) -> str:
    """A digest of the whole episode."""
    return _digest(as_data(play))


def as_data(play: OraclePlay) -> dict[str, Any]:
    """The episode without timings, for comparing byte by byte."""
    return {
        "system": play.task.system,
        "messages": play.task.messages,
        "tools": play.task.tools,
        "turns": [[turn.message, turn.replies] for turn in play.turns],
        "done": play.done,
        "score": [play.score.reward, play.score.success, play.score.parts],
    }


def canonical(value: Any) -> str:
    """JSON with sorted keys, as compared and hashed."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def shape(play: OraclePlay) -> str:
    """A digest of the episode's structure."""
    values = _values(play)
    said = [_masked(play.task.system, values)]
    said += [_masked(str(message.get("content") or ""), values) for message in play.task.messages]
    return _digest([said, [_turn_shape(turn.message, turn.replies, values) for turn in play.turns]])


def _turn_shape(message: dict[str, Any], replies: list[dict[str, Any]], values: set[str]) -> list[Any]:
    calls = [(call["function"]["name"], sorted(_arguments(call))) for call in message.get("tool_calls") or []]
    answers = [
        (reply["role"], _keys(reply["content"]) if reply["role"] == "tool" else _masked(reply["content"], values))
        for reply in replies
    ]
    return [calls, answers]


def _arguments(call: dict[str, Any]) -> dict[str, Any]:
    value = _parsed(call["function"]["arguments"])
    return value if isinstance(value, dict) else {}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _keys(text: str) -> list[str]:
    value = _parsed(text)
    return sorted(value) if isinstance(value, dict) else [type(value).__name__]


def _values(play: OraclePlay) -> set[str]:
    """Every word of every value in the oracle's arguments and the tools' answers, in lower case."""
    found: set[str] = set()
    for turn in play.turns:
        for call in turn.message.get("tool_calls") or []:
            _collect(_arguments(call), found)
        for reply in turn.replies:
            if reply["role"] == "tool":
                _collect(_parsed(reply["content"]), found)
    return found


def _collect(value: Any, found: set[str]) -> None:
    if isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, list):
        for item in value:
            _collect(item, found)
    elif isinstance(value, str):
        found.update(word.lower() for word in _WORD.findall(value))


def _masked(text: str, values: set[str]) -> str:
    """Words in lower case, values as #; an upper-case letter anywhere but at a sentence's start marks a name."""
    words = []
    start = True
    for match in re.finditer(r"[\w'-]+|[.!?]", text):
        word = match.group()
        if word in ".!?":
            start = True
            continue
        named = any(letter.isupper() for letter in (word[1:] if start else word)) and word != "I"
        words.append("#" if named or any(c.isdigit() for c in word) or word.lower() in values else word.lower())
        start = False
    return " ".join(words)


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:16]
