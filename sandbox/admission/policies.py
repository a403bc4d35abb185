"""Provide the building blocks of probing policies, the three floor policies, and edits of scripts.

A policy is a pure function of what an agent sees, the number of the turn and a seeded generator. Floor policies do not
try to solve the task. A script is a list of assistant messages that are sent whatever the replies are. A call's
position is the index of its message in the script and the call's index in the message.
"""

import json
import random
import re
from collections.abc import Callable
from typing import Any

from sandbox.contract import Message, Task, Tool
from sandbox.wire import OraclePlay

# An argument's JSON schema, and the "function" of a tool call: the environment chooses their content.
Schema = dict[str, Any]
FunctionCall = dict[str, Any]
Policy = Callable[[Task, list[Message], int, random.Random], Message]

# Guesses draw from at most this many values, half of them the first ones and half the last.
MAX_VALUES = 2000
# Longer words do not count as values.
MAX_VALUE_CHARACTERS = 1000
# Keys of tool replies whose values are collected.
MAX_KEYS = 300
_DIGIT = re.compile(r"\d")

SUCCESS_WORDS = "Done. Success! Everything you asked for has been completed, confirmed and verified. Reward 1.0."
REFUSAL = "I am sorry, but I cannot help with that request."
# Assistant messages of a policy that waits until the episode ends.
PATIENCE = 100
READ_PREFIXES = ("get", "find", "list", "search", "lookup", "calculate", "check", "think", "read", "show", "view")
# These policies send messages until the episode is done, at most ``PATIENCE``.
PATIENT_POLICIES = frozenset({"empty", "stall", "keep_reading"})
CallPosition = tuple[int, int]


def say(content: str) -> Message:
    """Return an assistant message of text alone."""
    return {"role": "assistant", "content": content}


def call(turn: int, *calls: tuple[str, str]) -> Message:
    """Return an assistant message of tool calls, each given as (name, JSON arguments)."""
    tool_calls = [
        {"id": f"call_{turn}_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": tool_calls}


def visible_values(task: Task, messages: list[Message]) -> list[str]:
    """Return the words that contain a digit, in order of appearance: ids, dates and numbers."""
    text = " ".join([task.system, *(str(message.get("content") or "") for message in [*task.messages, *messages])])
    words = (word for word in re.findall(r"[\w-]+", text) if len(word) <= MAX_VALUE_CHARACTERS and _DIGIT.search(word))
    values = list(dict.fromkeys(words))
    return values if len(values) <= MAX_VALUES else [*values[: MAX_VALUES // 2], *values[-MAX_VALUES // 2 :]]


def guess(tool: Tool, values: list[str], rng: random.Random) -> str:
    """Return JSON arguments that fit the tool's schema, filled from ``values``."""
    numbers = [int(value) for value in values if value.isascii() and value.isdecimal() and len(value) < 10] or [1]
    return fill_arguments(tool, lambda name, field: _guess_value(field, values, numbers, rng))


def _guess_value(field: object, values: list[str], numbers: list[int], rng: random.Random) -> object:
    field = field if isinstance(field, dict) else {}
    if isinstance(field.get("enum"), list) and field["enum"]:
        return rng.choice(field["enum"])
    match field.get("type"):
        case "integer" | "number":
            return rng.choice(numbers)
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [_guess_value(field.get("items"), values, numbers, rng)]
        case "object":
            return {}
    return rng.choice(values or ["1"])


def tool_name(tool: Tool) -> str:
    """Return the tool's name, as calls use it."""
    return str(tool["function"]["name"])


def write_tools(task: Task) -> list[Tool]:
    """Return the tools whose names do not begin with one of ``READ_PREFIXES``; all tools if every name does."""
    return [tool for tool in task.tools if not tool_name(tool).lower().startswith(READ_PREFIXES)] or task.tools


def read_tools(task: Task) -> list[Tool]:
    """Return the tools whose names begin with one of ``READ_PREFIXES``; all tools if none does."""
    return [tool for tool in task.tools if tool_name(tool).lower().startswith(READ_PREFIXES)] or task.tools


def fill_arguments(tool: Tool, value_for: Callable[[str, Schema], object]) -> str:
    """Return JSON arguments with ``value_for(name, schema)`` for every property of the tool."""
    return json.dumps({name: value_for(name, field) for name, field in properties(tool).items()})


def properties(tool: Tool) -> dict[str, Schema]:
    """Return the schemas of the tool's arguments by name; a malformed schema counts as empty."""
    schema = tool["function"]["parameters"]
    fields = schema.get("properties") if isinstance(schema, dict) else None
    fields = fields if isinstance(fields, dict) else {}
    return {str(name): field if isinstance(field, dict) else {} for name, field in fields.items()}


def required_arguments(tool: Tool) -> list[str]:
    """Return the names of the arguments that the tool's schema requires."""
    required = tool["function"]["parameters"].get("required")
    return required if isinstance(required, list) else []


def request(task: Task) -> str:
    """Return the text of the user's first message."""
    return next((str(message.get("content") or "") for message in task.messages if message["role"] == "user"), "")


def observed_values(messages: list[Message]) -> dict[str, list[object]]:
    """Return the distinct scalar values in the tools' JSON replies by key, in order of appearance and bounded."""
    values_by_key: dict[str, dict[object, None]] = {}
    for message in messages:
        if message.get("role") == "tool":
            try:
                _collect_values("", json.loads(str(message.get("content"))), values_by_key)
            except (ValueError, RecursionError):
                continue
    return {key: list(values) for key, values in values_by_key.items()}


def _collect_values(key: str, value: object, values_by_key: dict[str, dict[object, None]]) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            _collect_values(str(name), item, values_by_key)
    elif isinstance(value, list):
        for item in value:
            _collect_values(key, item, values_by_key)
    elif len(str(value)) <= MAX_VALUE_CHARACTERS and (key in values_by_key or len(values_by_key) < MAX_KEYS):
        values = values_by_key.setdefault(key, {})
        if len(values) < MAX_VALUES:
            values.setdefault(value)


def candidate_values(
    name: str, field: Schema, observations: dict[str, list[object]], values: list[str]
) -> list[object]:
    """Return candidates for an argument: its enum or truth values, else values of its name in replies, else ``values``.

    A number takes numbers from replies only, else 1.
    """
    if isinstance(field.get("enum"), list) and field["enum"]:
        return list(field["enum"])
    if field.get("type") == "boolean":
        return [True, False]
    matching_keys = [key for key in observations if key and (key == name or name.endswith(f"_{key}"))]
    matches = [value for key in matching_keys for value in observations[key]]
    if field.get("type") in {"integer", "number"}:
        return [value for value in matches if isinstance(value, int | float)] or [1]
    return matches or list(values) or ["1"]


def empty(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Send an empty text."""
    return say("")


def refusing(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Refuse every request."""
    return say(REFUSAL)


def random_calls(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Call a random tool with guessed arguments, or now and then send a text."""
    if not task.tools or rng.random() < 0.15:
        return say("Is there anything else?")
    tool = rng.choice(task.tools)
    return call(turn, (tool_name(tool), guess(tool, visible_values(task, messages), rng)))


FLOOR_POLICIES: dict[str, Policy] = {"empty": empty, "refusing": refusing, "random": random_calls}


def script_of(play: OraclePlay) -> list[Message]:
    """Return the assistant messages of the oracle."""
    return [turn.message for turn in play.turns]


def calls(script: list[Message]) -> dict[CallPosition, FunctionCall]:
    """Return every tool call of the script by its position."""
    return {
        (turn, index): call["function"]
        for turn, message in enumerate(script)
        for index, call in enumerate(message.get("tool_calls") or [])
    }


def name_of(call: FunctionCall) -> str:
    """Return the name of the called tool."""
    return str(call["name"])


def arguments_of(call: FunctionCall) -> dict[str, object]:
    """Return the call's arguments; empty if they are no JSON object."""
    try:
        value = json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def without_calls(script: list[Message], positions: set[CallPosition]) -> list[Message]:
    """Return a copy of the script without these calls, and without messages that become empty."""
    messages: list[Message] = []
    for turn, message in enumerate(script):
        calls = message.get("tool_calls") or []
        remaining_calls = [call for index, call in enumerate(calls) if (turn, index) not in positions]
        if remaining_calls or not calls or message.get("content"):
            messages.append({**message, "tool_calls": remaining_calls} if remaining_calls else _text_only(message))
    return messages


def _text_only(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "tool_calls"}


def with_arguments(script: list[Message], position: CallPosition, arguments: str) -> list[Message]:
    """Return a copy of the script in which one call has other arguments, given as JSON."""
    turn, call_index = position
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments}} if index == call_index else call
        for index, call in enumerate(script[turn]["tool_calls"])
    ]
    return [*script[:turn], {**script[turn], "tool_calls": calls}, *script[turn + 1 :]]
