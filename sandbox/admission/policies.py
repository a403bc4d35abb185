"""Policies that must not succeed: the floor (nothing, refusing, chance) and reward exploits.

Each is a pure function of what an agent sees, the turn's number and a seeded generator. They guess arguments from ids
and numbers visible in the conversation, as an agent that wants reward without work would. Not covered: exploits that
read the environment's source, and models; a later panel may add them to ``EXPLOITS``.
"""

import json
import random
import re
from collections.abc import Callable
from typing import Any

from sandbox.contract import Message, Task, Tool

Policy = Callable[[Task, list[Message], int, random.Random], Message]

SUCCESS_WORDS = "Done. Success! Everything you asked for has been completed, confirmed and verified. Reward 1.0."
REFUSAL = "I am sorry, but I cannot help with that request."
READS = ("get", "find", "list", "search", "lookup", "calculate", "check", "think", "read", "show", "view")


def say(content: str) -> Message:
    """An assistant message of text alone."""
    return {"role": "assistant", "content": content}


def call(turn: int, *calls: tuple[str, str]) -> Message:
    """An assistant message of tool calls, each (name, JSON arguments)."""
    listed = [
        {"id": f"call_{turn}_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": listed}


def visible_values(task: Task, messages: list[Message]) -> list[str]:
    """Words with a digit in them, in order of appearance: ids, dates and numbers."""
    text = " ".join([task.system, *(str(message.get("content") or "") for message in [*task.messages, *messages])])
    return list(dict.fromkeys(re.findall(r"[\w-]*\d[\w-]*", text)))


def guess(tool: Tool, values: list[str], rng: random.Random) -> str:
    """JSON arguments that fit the tool's schema, filled from ``values``."""
    schema = tool["function"]["parameters"]
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    return json.dumps({name: _value(field, values, rng) for name, field in properties.items()})


def _value(field: Any, values: list[str], rng: random.Random) -> Any:
    field = field if isinstance(field, dict) else {}
    if isinstance(field.get("enum"), list) and field["enum"]:
        return rng.choice(field["enum"])
    numbers = [int(value) for value in values if value.isascii() and value.isdecimal() and len(value) < 10] or [1]
    match field.get("type"):
        case "integer" | "number":
            return rng.choice(numbers)
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [_value(field.get("items"), values, rng)]
        case "object":
            return {}
    return rng.choice(values or ["1"])


def write_tools(task: Task) -> list[Tool]:
    """The tools whose names do not begin like a read; all of them where every name does."""
    writes = [tool for tool in task.tools if not tool["function"]["name"].lower().startswith(READS)]
    return writes or task.tools


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def empty(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Say nothing."""
    return say("")


def refusing(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Refuse, always."""
    return say(REFUSAL)


def random_calls(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Call tools by chance, speak now and then."""
    if not task.tools or rng.random() < 0.15:
        return say("Is there anything else?")
    tool = rng.choice(task.tools)
    return call(turn, (_name(tool), guess(tool, visible_values(task, messages), rng)))


def say_success(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Claim success and do nothing."""
    return say(SUCCESS_WORDS)


def write_first(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Call one writing tool at once, look nothing up, claim success."""
    if turn or not task.tools:
        return say(SUCCESS_WORDS)
    tool = rng.choice(write_tools(task))
    return call(turn, (_name(tool), guess(tool, visible_values(task, messages), rng)))


def repeat_calls(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Call the same tool in the same way six times, then claim success."""
    if turn >= 6 or not task.tools:
        return say(SUCCESS_WORDS)
    first = next((message for message in messages if message.get("tool_calls")), None)
    if first is not None:
        function = first["tool_calls"][0]["function"]
        return call(turn, (function["name"], function["arguments"]))
    tool = rng.choice(task.tools)
    return call(turn, (_name(tool), guess(tool, visible_values(task, messages), rng)))


def every_tool(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Call every tool in one message, then claim success."""
    if turn or not task.tools:
        return say(SUCCESS_WORDS)
    values = visible_values(task, messages)
    return call(turn, *((_name(tool), guess(tool, values, rng)) for tool in task.tools))


FLOOR: dict[str, Policy] = {"empty": empty, "refusing": refusing, "random": random_calls}
EXPLOITS: dict[str, Policy] = {
    "say_success": say_success,
    "write_first": write_first,
    "repeat_calls": repeat_calls,
    "every_tool": every_tool,
}
