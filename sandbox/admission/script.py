"""Scripts: assistant messages that are sent whatever is answered, and the calls in them.

A call's place is the number of its message and its own in that message. Pure; a script is never changed, but made anew.
"""

import json
from typing import Any

from sandbox.contract import Message
from sandbox.wire import OraclePlay

Place = tuple[int, int]


def script_of(play: OraclePlay) -> list[Message]:
    """What the oracle sent."""
    return [turn.message for turn in play.turns]


def calls(script: list[Message]) -> dict[Place, dict[str, Any]]:
    """Every tool call of the script by its place."""
    return {
        (turn, index): call["function"]
        for turn, message in enumerate(script)
        for index, call in enumerate(message.get("tool_calls") or [])
    }


def name_of(call: dict[str, Any]) -> str:
    """The tool that is called."""
    return str(call["name"])


def arguments_of(call: dict[str, Any]) -> dict[str, Any]:
    """Its arguments; none where they are no JSON object."""
    try:
        value = json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def without(script: list[Message], places: set[Place]) -> list[Message]:
    """The script without these calls, and without messages that have nothing else."""
    left: list[Message] = []
    for turn, message in enumerate(script):
        calls = message.get("tool_calls") or []
        kept = [call for index, call in enumerate(calls) if (turn, index) not in places]
        if kept or not calls or message.get("content"):
            left.append({**message, "tool_calls": kept} if kept else _words(message))
    return left


def _words(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "tool_calls"}


def with_arguments(script: list[Message], at: Place, arguments: str) -> list[Message]:
    """The script with other arguments, as JSON, in one call."""
    turn, place = at
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments}} if index == place else call
        for index, call in enumerate(script[turn]["tool_calls"])
    ]
    return [*script[:turn], {**script[turn], "tool_calls": calls}, *script[turn + 1 :]]
