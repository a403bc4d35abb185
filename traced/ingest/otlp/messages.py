"""One told message, whichever convention its sender follows, as the messages of OpenAI's chat form.

    {"role", "parts": [{"type": "text" | "tool_call" | "tool_call_response" | "reasoning" ...}]}   OpenTelemetry, now
    {"role", "content", "tool_calls": [{"id", "type", "function": {"name", "arguments"}}]}         OpenAI, and before
    {"role", "content", "tool_calls": [{"id", "name", "arguments"}]}                               OpenLLMetry
    {"message": {"role", "content" | "contents", "tool_calls": [{"tool_call": {...}}]}}            OpenInference

Invariants: pure; what one call says in its answer and a later one repeats in its input becomes the same message, so
that exchanges chain. Content is text: several parts are joined by line ends, and a part that is no text leaves its
type in brackets. Arguments are JSON in a text, as their sender wrote them where it sent text.
Fails: ``Unfit`` with the reason.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
ROLES = {"human": "user", "ai": "assistant", "model": "assistant", "function": "tool"}
KNOWN = ("system", "developer", "user", "assistant", "tool")
TEXTS = ("text", "input_text", "output_text", "refusal", None)
WRAPPERS = ("message", "tool_call", "message_content", "tool", "prompt", "completion")


class Unfit(Exception):
    """A span of which no exchange can be made; the text says why, and what to do where the sender can do something."""


@dataclass
class _Said:
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)


def chat_messages(told: Any, role: str) -> list[Message]:
    """The chat messages of one told message; ``role`` is its role where it names none.

    It is more than one where a message holds the results of several tool calls.
    """
    if isinstance(told, str):
        return [{"role": role, "content": told}]
    told = _unwrapped(told)
    given = told.get("role") or role
    role = ROLES.get(str(given).lower(), str(given).lower())
    if role not in KNOWN:
        raise Unfit(f"a message has a role that chat does not know; there are: {', '.join(KNOWN)}")
    said = _Said()
    for part in _parts(told):
        _hear(said, part)
    said.calls += [_call(_unwrapped(one)) for one in _list(told.get("tool_calls"), "tool_calls")]
    if name := told.get("function_call_name"):
        said.calls.append(_call({"name": name, "arguments": told.get("function_call_arguments_json")}))
    elif isinstance(told.get("function_call"), Mapping):
        said.calls.append(_call(told["function_call"]))
    return _messages(said, role, told)


def chat_tools(told: Any) -> list[dict[str, Any]]:
    """Tool definitions as OpenAI's function tools; what has no name is no function, and left out."""
    tools: list[dict[str, Any]] = []
    for one in _list(told, "tools"):
        tool = _unwrapped(parsed(one, "a tool"))
        if "json_schema" in tool:
            tool = _unwrapped(parsed(tool["json_schema"], "a tool's schema"))
        function = tool.get("function")
        if not isinstance(function, Mapping):
            kept = {name: tool[name] for name in ("name", "description") if tool.get(name)}
            schema: Any = next((tool[name] for name in ("parameters", "input_schema") if tool.get(name)), {})
            function = {**kept, "parameters": parsed(schema, "a tool's parameters")}
        if function.get("name"):
            tools.append({"type": "function", "function": dict(function)})
    return tools


def parsed(value: Any, what: str) -> Any:
    """The value of JSON in a text; anything else as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Unfit(
            f"{what}: no JSON that can be read; where it was cut off, raise OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT there"
        ) from error


def text_of(value: Any) -> str:
    """A value as a model reads it: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return value
    try:
        return "" if value is None else json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError) as error:
        raise Unfit("a value is nested too deeply") from error


def _unwrapped(told: Any) -> Mapping[str, Any]:
    """OpenInference puts what belongs together under a name of its own."""
    if not isinstance(told, Mapping):
        raise Unfit(f"an object is needed, not {type(told).__name__}")
    for name in WRAPPERS:
        if isinstance(inner := told.get(name), Mapping) and "role" not in told and "type" not in told:
            return inner
    return told


def _list(told: Any, what: str) -> list[Any]:
    told = parsed(told, what)
    if told is None or told == "":
        return []
    if isinstance(told, Mapping):
        return [told]
    if not isinstance(told, list):
        raise Unfit(f"{what}: a list is needed, not {type(told).__name__}")
    return told


def _parts(told: Mapping[str, Any]) -> list[Any]:
    for name in ("parts", "contents", "content", "text"):
        value = told.get(name)
        if isinstance(value, list):
            return value
        if value is not None and value != "":
            return [text_of(value)]
    return []


def _hear(said: _Said, part: Any) -> None:
    if isinstance(part, str):
        said.texts.append(part)
        return
    part = _unwrapped(part)
    kind = part.get("type")
    content = part.get("content", part.get("text", part.get("refusal")))
    if kind in TEXTS:
        said.texts.append(text_of(content))
    elif kind in ("reasoning", "thinking"):
        said.thoughts.append(text_of(part.get("thinking", content)))
    elif kind in ("tool_call", "tool_use", "function_call"):
        said.calls.append(_call(part))
    elif kind in ("tool_call_response", "tool_result", "function_call_output"):
        result = next((part[name] for name in ("response", "result", "output", "content") if name in part), "")
        said.results.append({"role": "tool", "tool_call_id": _id(part), "content": text_of(result)})
    else:
        said.texts.append(f"[{str(kind)[:40]}]")


def _call(told: Mapping[str, Any]) -> dict[str, Any]:
    function = told.get("function")
    named = function if isinstance(function, Mapping) else told
    name = named.get("name")
    if not isinstance(name, str) or not name:
        raise Unfit("a tool call has no name")
    arguments = text_of(named.get("arguments", named.get("input"))) or "{}"
    return {"id": _id(told), "type": "function", "function": {"name": name, "arguments": arguments}}


def _id(told: Mapping[str, Any]) -> str:
    return next((str(told[name]) for name in ("tool_call_id", "call_id", "tool_use_id", "id") if told.get(name)), "")


def _messages(said: _Said, role: str, told: Mapping[str, Any]) -> list[Message]:
    text = "\n".join(said.texts)
    if said.results:
        return [*said.results, *([{"role": "user", "content": text}] if text else [])]
    if role == "tool":
        return [{"role": role, "tool_call_id": _id(told), "content": text}]
    if role != "assistant":
        return [{"role": role, "content": text}]
    message: Message = {"role": role, "content": text or (None if said.calls else "")}
    if said.thoughts:
        message["reasoning_content"] = "\n".join(said.thoughts)
    if said.calls:
        message["tool_calls"] = said.calls
    return [message]
