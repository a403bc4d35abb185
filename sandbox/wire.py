"""Parse the output of a container strictly, because an attacker may have written it.

A line must be strict JSON in UTF-8 (no NaN, no lone surrogates, at most ``MAX_DEPTH`` levels) with a valid envelope;
otherwise the parser raises ProtocolFault. Every value must satisfy the contract: rewards are finite numbers in [0, 1],
success needs the full reward, messages and tools have OpenAI's form. Otherwise it raises EnvironmentFault. All
functions are pure.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sandbox.contract import Message, Score, Task, Tool
from sandbox.episodes import Step
from sandbox.errors import EnvironmentFault, ProtocolFault, clipped

# Success needs at least this reward.
PASS_MARK = 1.0
MAX_TOOLS = 128
# Values in the schemas of all tools of a task: as Python objects, small values take many times the memory of their
# text.
MAX_SCHEMA_VALUES = 10_000
# Tool calls in one assistant message.
MAX_CALLS = 128
# Values in the arguments of one oracle message.
MAX_ARGUMENTS = 1000
# Messages of a task or a response; messages and tool calls of the oracle's whole episode.
MAX_MESSAGES = 1024
# Texts that end the conversation of an environment's user.
MAX_STOPS = 16
# Named parts of a score.
MAX_PARTS = 256
MAX_DEPTH = 64
MAX_SECONDS = 1e6
MAX_EVENTS = 20


@dataclass(frozen=True)
class Answer:
    """One response line of the worker: ``value`` if it is "ok", else ``fault`` with "kind", "error", "traceback"."""

    id: int
    # Measured by the worker; environment code shares its process and can forge it: informational only.
    seconds: float
    value: dict[str, Any] | None
    fault: dict[str, str] | None
    # Length of the line in bytes.
    bytes: int = 0


@dataclass(frozen=True)
class OracleTurn:
    """One assistant message of the oracle and the environment's replies."""

    message: Message
    replies: list[Message]


@dataclass(frozen=True)
class OraclePlay:
    """A whole episode played by the environment's own oracle."""

    task: Task
    turns: list[OracleTurn]
    done: bool
    score: Score
    seconds: float = 0.0
    # Length in bytes of the response line that held the episode.
    bytes: int = 0


def read_answer(line: bytes) -> Answer:
    """Parse one response line of the worker; raises ProtocolFault."""
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
        if line.count(b"[") + line.count(b"{") > MAX_DEPTH:
            _check_depth(value)
        if b"\\u" in line:
            # The JSON decoder accepts an escaped lone surrogate; this encoding fails on it.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        excerpt = clipped(line.decode("utf-8", "backslashreplace"), 200)
        raise ProtocolFault(f"the worker's line is no strict JSON ({error}): {excerpt}") from error
    if not isinstance(value, dict) or type(value.get("id")) is not int or ("ok" in value) == ("fault" in value):
        raise ProtocolFault(f"the worker's line has no valid envelope: {clipped(str(value), 200)}")
    body = value.get("ok", value.get("fault"))
    if not isinstance(body, dict):
        raise ProtocolFault(f"the worker's answer is a {type(body).__name__}, not an object")
    fault = {name: body.get(name, "") for name in ("kind", "error", "traceback")} if "fault" in value else None
    if fault and not all(isinstance(text, str) for text in fault.values()):
        raise ProtocolFault(f"a field of the worker's fault is not text: {clipped(str(body), 200)}")
    return Answer(value["id"], _seconds(value.get("seconds")), None if fault else body, fault, len(line))


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        outer = [container for container in level if isinstance(container, dict | list)]
        level = [
            item for container in outer for item in (container.values() if isinstance(container, dict) else container)
        ]
    if level:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value <= MAX_SECONDS else 0.0


def read_task(value: object, op: str = "reset") -> Task:
    """Parse a Task of the contract; raises EnvironmentFault."""
    fields = _object(value, op, "task")
    system = _text(fields.get("system"), op, "task.system")
    messages = _messages(fields.get("messages"), op, {"user", "assistant", "tool"})
    if not any(message["role"] == "user" for message in messages):
        raise EnvironmentFault(op, "the task's messages hold none from the user")
    tools = [_tool(item, op) for item in _list(fields.get("tools"), op, "tools")]
    if _has_more_than(tools, MAX_SCHEMA_VALUES):
        raise EnvironmentFault(op, f"the tools' schemas hold more than {MAX_SCHEMA_VALUES:,} values")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) != len(names) or len(names) > MAX_TOOLS:
        raise EnvironmentFault(op, f"tool names repeat, or are more than {MAX_TOOLS}: {names[:12]}")
    return Task(system, messages, tools)


def read_step(value: object, op: str = "step") -> Step:
    """Parse the replies to an assistant message and whether the episode ended; raises EnvironmentFault."""
    fields = _object(value, op, "answer")
    return Step(_replies(fields.get("messages"), op), _boolean(fields.get("done"), op, "done"))


def read_user_request(value: object, op: str = "step") -> dict[str, Any]:
    """Parse what an environment asks its user (``sandbox.user.User``), and drop other keys; raises EnvironmentFault."""
    fields = _object(value, op, "user_request")
    items = _list(fields.get("messages"), op, "'messages' in user_request")
    messages = [_object(item, op, "a message of user_request") for item in items]
    _check_message_count(len(messages), op)
    for message in messages:
        if message.get("role") not in ("user", "assistant"):
            role = clipped(repr(message.get("role")), 80)
            raise EnvironmentFault(op, f"a message of user_request has role {role}; allowed: assistant, user")
    stop_items = _list(fields.get("stops") or [], op, "'stops' in user_request")
    stops = [_text(stop, op, "a text of 'stops'") for stop in stop_items]
    if not all(stops) or len(stops) > MAX_STOPS:
        raise EnvironmentFault(op, f"'stops' in user_request must be at most {MAX_STOPS} texts, none of them empty")
    return {
        "system": _text(fields.get("system"), op, "'system' in user_request"),
        "goal": _text(fields.get("goal") or "", op, "'goal' in user_request"),
        "messages": [
            {"role": message["role"], "content": _text(message.get("content") or "", op, "content in user_request")}
            for message in messages
        ],
        "stops": stops,
    }


def read_score(value: object, op: str = "score") -> Score:
    """Parse a Score and check its bounds; raises EnvironmentFault."""
    fields = _object(value, op, "score")
    reward = _unit_number(fields.get("reward"), op, "reward")
    success = _boolean(fields.get("success"), op, "success")
    if success and reward < PASS_MARK:
        raise EnvironmentFault(op, f"success with reward {reward}; success needs {PASS_MARK}")
    parts = _object(fields.get("parts"), op, "parts")
    if len(parts) > MAX_PARTS:
        raise EnvironmentFault(op, f"the score has {len(parts)} parts, more than {MAX_PARTS}")
    return Score(reward, success, {name: _unit_number(part, op, f"parts[{name!r}]") for name, part in parts.items()})


def read_oracle(value: object, seconds: float = 0.0, size: int = 0) -> OraclePlay:
    """Parse the oracle's whole episode, received in ``size`` bytes; raises EnvironmentFault."""
    fields = _object(value, "oracle", "play")
    turns = [
        OracleTurn(_message(turn.get("message"), "oracle", {"assistant"}), _replies(turn.get("replies"), "oracle"))
        for turn in (_object(item, "oracle", "turn") for item in _list(fields.get("turns"), "oracle", "turns"))
    ]
    for turn in turns:
        _check_argument_count(turn.message)
    calls = sum(len(turn.message.get("tool_calls") or []) for turn in turns)
    _check_message_count(calls + sum(1 + len(turn.replies) for turn in turns), "oracle")
    done = _boolean(fields.get("done"), "oracle", "done")
    task, score = read_task(fields.get("task"), "oracle"), read_score(fields.get("score"))
    return OraclePlay(task, turns, done, score, seconds, size)


def read_effects(value: object, op: str = "effects") -> dict[str, Any]:
    """Parse the worker's record of side effects (``effects.py``) and sanitize its texts; raises EnvironmentFault."""
    fields = _object(value, op, "answer")
    events = [_text(event, op, "an event") for event in _list(fields.get("events"), op, "events")]
    head = _text(fields.get("printed_head"), op, "printed_head")
    return {
        "events": [clipped(event, 200) for event in events[:MAX_EVENTS]],
        "count": _count(fields.get("count"), op, "count"),
        "printed": _count(fields.get("printed"), op, "printed"),
        "printed_head": clipped(head, 200),
    }


def _replies(value: object, op: str) -> list[Message]:
    return _messages(value, op, {"tool", "user"})


def _messages(value: object, op: str, roles: set[str]) -> list[Message]:
    items = _list(value, op, "messages")
    _check_message_count(len(items), op)
    return [_message(item, op, roles) for item in items]


def _check_message_count(count: int, op: str) -> None:
    if count > MAX_MESSAGES:
        raise EnvironmentFault(op, f"it holds {count:,} messages and calls, more than {MAX_MESSAGES:,}")


def _message(value: object, op: str, roles: set[str]) -> Message:
    fields = _object(value, op, "message")
    role = fields.get("role")
    if role not in roles:
        raise EnvironmentFault(op, f"a message has role {clipped(repr(role), 80)}; allowed: {', '.join(sorted(roles))}")
    # Only fields of OpenAI's API are copied: agents must not see others, and the host need not store them.
    message: Message = {"role": role}
    if role != "assistant" or fields.get("content") is not None:
        message["content"] = _text(fields.get("content"), op, f"content of a {role} message")
    elif "content" in fields:
        message["content"] = None
    if role == "tool":
        message["tool_call_id"] = _text(fields.get("tool_call_id"), op, "tool_call_id")
    if fields.get("name") is not None:
        message["name"] = _text(fields["name"], op, "a message's name")
    if fields.get("tool_calls"):
        calls = _list(fields["tool_calls"], op, "tool_calls")
        if len(calls) > MAX_CALLS:
            raise EnvironmentFault(op, f"a message holds {len(calls)} tool calls, more than {MAX_CALLS}")
        message["tool_calls"] = [_call(call, op) for call in calls]
    return message


def _call(value: object, op: str) -> Message:
    fields = _object(value, op, "tool call")
    function = _object(fields.get("function"), op, "tool call's function")
    named_function = {
        "name": _text(function.get("name"), op, "tool call's name"),
        "arguments": _text(function.get("arguments"), op, "tool call's arguments"),
    }
    return {"id": _text(fields.get("id"), op, "tool call's id"), "type": "function", "function": named_function}


def _tool(value: object, op: str) -> Tool:
    tool = _object(value, op, "tool")
    function = _object(tool.get("function"), op, "tool.function")
    if tool.get("type") != "function" or not _text(function.get("name"), op, "tool name"):
        raise EnvironmentFault(op, f"a tool is no OpenAI function schema: {clipped(str(tool), 200)}")
    _object(function.get("parameters"), op, "tool.function.parameters")
    return tool


def _check_argument_count(message: Message) -> None:
    arguments: list[object] = []
    for call in message.get("tool_calls") or []:
        # An oracle may send a call with broken JSON on purpose.
        with suppress(ValueError, RecursionError):
            arguments.append(json.loads(call["function"]["arguments"]))
    if _has_more_than(arguments, MAX_ARGUMENTS):
        raise EnvironmentFault("oracle", f"the arguments of a message hold more than {MAX_ARGUMENTS:,} values")


def _has_more_than(values: Sequence[object], limit: int) -> bool:
    count, level = 0, values
    while level and count <= limit:
        count += len(level)
        outer = [container for container in level if isinstance(container, dict | list)]
        level = [
            item for container in outer for item in (container.values() if isinstance(container, dict) else container)
        ]
    return count > limit


def _unit_number(value: object, op: str, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise EnvironmentFault(op, f"{field} is {clipped(repr(value), 80)}; it must be a number in [0, 1]")
    return float(value)


def _count(value: object, op: str, field: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise EnvironmentFault(op, f"{field} is {clipped(repr(value), 80)}; it must be a count")
    return value


def _boolean(value: object, op: str, field: str) -> bool:
    if not isinstance(value, bool):
        raise EnvironmentFault(op, f"{field} is {clipped(repr(value), 80)}; it must be true or false")
    return value


def _text(value: object, op: str, field: str) -> str:
    if not isinstance(value, str):
        raise EnvironmentFault(op, f"{field} is {clipped(repr(value), 80)}; it must be text")
    return value


def _list(value: object, op: str, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise EnvironmentFault(op, f"{field} is {clipped(repr(value), 80)}; it must be a list")
    return value


def _object(value: object, op: str, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EnvironmentFault(op, f"{field} is {clipped(repr(value), 80)}; it must be an object")
    return value
