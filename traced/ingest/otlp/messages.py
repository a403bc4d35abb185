"""Convert a message of any tracing convention to OpenAI chat messages.

    {"role", "parts": [{"type": "text" | "tool_call" | "tool_call_response" | "reasoning" ...}]}   OpenTelemetry
    {"role", "content", "tool_calls": [{"id", "type", "function": {"name", "arguments"}}]}         OpenAI, older senders
    {"role", "content", "tool_calls": [{"id", "name", "arguments"}]}                               OpenLLMetry
    {"message": {"role", "content" | "contents", "tool_calls": [{"tool_call": {...}}]}}            OpenInference

An answer and its repetition in the input of a later call are converted to the same message, so that exchanges can be
chained to a conversation. Text parts are joined by line breaks; a part that is not text is replaced by its type in
brackets. Errors: ``UnusableSpan``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from store.types import Message, Tool

Fields = Mapping[str, Any]
ROLE_ALIASES = {"human": "user", "ai": "assistant", "model": "assistant", "function": "tool"}
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_TYPES = ("text", "input_text", "output_text", "refusal", None)
WRAPPERS = ("message", "tool_call", "message_content", "tool", "prompt", "completion")


class UnusableSpan(Exception):
    """The span cannot become an exchange; the message says why, and where possible what to change at the sender."""


@dataclass
class _MessageParts:
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Tool] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)


def chat_messages(message: object, role: str) -> list[Message]:
    """Convert a message to chat messages; a message with the results of several tool calls gives several.

    ``role`` is the role of a message that names none. Raises ``UnusableSpan``.
    """
    if isinstance(message, str):
        return [{"role": role, "content": message}]
    message = _unwrap(message)
    role_name = message.get("role") or role
    role = ROLE_ALIASES.get(str(role_name).lower(), str(role_name).lower())
    if role not in CHAT_ROLES:
        raise UnusableSpan(f"a message has an unknown role; the roles are: {', '.join(CHAT_ROLES)}")
    collected = _MessageParts()
    for part in _parts(message):
        _add_part(collected, part)
    collected.calls += [_call(_unwrap(call)) for call in _list(message.get("tool_calls"), "tool_calls")]
    if name := message.get("function_call_name"):
        collected.calls.append(_call({"name": name, "arguments": message.get("function_call_arguments_json")}))
    elif isinstance(message.get("function_call"), Mapping):
        collected.calls.append(_call(message["function_call"]))
    return _to_messages(collected, role, message)


def chat_tools(definitions: object) -> list[Tool]:
    """Convert tool definitions to OpenAI function tools; those without a name are left out."""
    tools: list[Tool] = []
    for definition in _list(definitions, "tools"):
        tool = _unwrap(parse_json(definition, "a tool"))
        if "json_schema" in tool:
            tool = _unwrap(parse_json(tool["json_schema"], "a tool's schema"))
        function = tool.get("function")
        if not isinstance(function, Mapping):
            fields = {name: tool[name] for name in ("name", "description") if tool.get(name)}
            schema: Any = next((tool[name] for name in ("parameters", "input_schema") if tool.get(name)), {})
            function = {**fields, "parameters": parse_json(schema, "a tool's parameters")}
        if function.get("name"):
            tools.append({"type": "function", "function": dict(function)})
    return tools


def parse_json(value: object, description: str) -> Any:
    """Parse text that is a JSON object or list; return any other value unchanged.

    Raises:
        UnusableSpan: The JSON is invalid; the message begins with ``description``.
    """
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UnusableSpan(
            f"{description}: invalid JSON; if it was truncated, raise OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT at the sender"
        ) from error


def text_of(value: object) -> str:
    """Return a value as text: text unchanged, None as "", anything else as JSON; raises ``UnusableSpan``."""
    if isinstance(value, str):
        return value
    try:
        return "" if value is None else json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError) as error:
        raise UnusableSpan("a value is nested too deeply") from error


def _unwrap(value: object) -> Fields:
    if not isinstance(value, Mapping):
        raise UnusableSpan(f"expected an object, found {type(value).__name__}")
    # OpenInference wraps each object in an outer object whose only key is the object's type.
    for name in WRAPPERS:
        if isinstance(inner := value.get(name), Mapping) and "role" not in value and "type" not in value:
            return inner
    return value


def _list(value: object, description: str) -> list[Any]:
    value = parse_json(value, description)
    if value is None or value == "":
        return []
    if isinstance(value, Mapping):
        return [value]
    if not isinstance(value, list):
        raise UnusableSpan(f"{description}: expected a list, found {type(value).__name__}")
    return value


def _parts(message: Fields) -> list[Any]:
    for name in ("parts", "contents", "content", "text"):
        value = message.get(name)
        if isinstance(value, list):
            return value
        if value is not None and value != "":
            return [text_of(value)]
    return []


def _add_part(collected: _MessageParts, part: object) -> None:
    if isinstance(part, str):
        collected.texts.append(part)
        return
    part = _unwrap(part)
    kind = part.get("type")
    content = part.get("content", part.get("text", part.get("refusal")))
    if kind in TEXT_TYPES:
        collected.texts.append(text_of(content))
    elif kind in ("reasoning", "thinking"):
        collected.reasoning.append(text_of(part.get("thinking", content)))
    elif kind in ("tool_call", "tool_use", "function_call"):
        collected.calls.append(_call(part))
    elif kind in ("tool_call_response", "tool_result", "function_call_output"):
        result = next((part[name] for name in ("response", "result", "output", "content") if name in part), "")
        collected.results.append({"role": "tool", "tool_call_id": _id(part), "content": text_of(result)})
    else:
        collected.texts.append(f"[{str(kind)[:40]}]")


def _call(call: Fields) -> dict[str, Any]:
    function = call.get("function")
    fields = function if isinstance(function, Mapping) else call
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise UnusableSpan("a tool call has no name")
    arguments = text_of(fields.get("arguments", fields.get("input"))) or "{}"
    return {"id": _id(call), "type": "function", "function": {"name": name, "arguments": arguments}}


def _id(fields: Fields) -> str:
    return next(
        (str(fields[name]) for name in ("tool_call_id", "call_id", "tool_use_id", "id") if fields.get(name)), ""
    )


def _to_messages(collected: _MessageParts, role: str, fields: Fields) -> list[Message]:
    text = "\n".join(collected.texts)
    if collected.results:
        return [*collected.results, *([{"role": "user", "content": text}] if text else [])]
    if role == "tool":
        return [{"role": role, "tool_call_id": _id(fields), "content": text}]
    if role != "assistant":
        return [{"role": role, "content": text}]
    message: Message = {"role": role, "content": text or (None if collected.calls else "")}
    if collected.reasoning:
        message["reasoning_content"] = "\n".join(collected.reasoning)
    if collected.calls:
        message["tool_calls"] = collected.calls
    return [message]
