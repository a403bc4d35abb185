"""Messages of every form that the formats hold, as OpenAI chat messages: the one place that converts them.

Read are OpenAI's chat messages (with functions as they were before tools), the items of its responses form, Anthropic's
content blocks, LangChain's messages in its three serialised forms, and what Langfuse's and LangSmith's own integrations
make of them. Taken over is what an agent in production sees: role, text, tool calls, ids and names.

Invariants: roles are system, user, assistant and tool; content is text or None; arguments of calls are JSON text, those
that were text already are left as they are; converting again changes nothing. Parts of content that are no text leave
``[image_url]`` and the like; what a model thought is left out, as it is not sent back.
How it fails: ``Damage`` names the message (counted from 0) and what is wrong with it.
Not covered: images, sound and files themselves; tools that a provider runs on its own side.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from store.types import Message, Tool
from traced.importers.errors import Damage

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "ai", "model"), "assistant"),
    **dict.fromkeys(("tool", "function"), "tool"),
}
TEXT = ("text", "input_text", "output_text")
THOUGHT = ("thinking", "redacted_thinking", "reasoning", "reasoning_content")
RESULTS = ("function_call_output", "custom_tool_call_output")

Fields = Mapping[str, Any]


def chat(messages: Any) -> list[Message]:
    """A conversation; raises Damage."""
    if not isinstance(messages, list):
        raise Damage(f"messages have to be a list, found {kind(messages)}")
    made: list[Message] = []
    for index, message in enumerate(messages):
        for one in read_message(message, index):
            earlier = made[-1] if made else {}
            if _is_item(message) and one["role"] == "assistant" == earlier.get("role") and "tool_calls" in one:
                earlier["tool_calls"] = [*earlier.get("tool_calls", []), *one["tool_calls"]]
            else:
                made.append(one)
    return made


def read_message(message: Any, index: int) -> list[Message]:
    """One message, which may hold several (results of tools among a user's words) or none (thoughts)."""
    fields, role = _unwrapped(message, index)
    if fields.get("type") == "function_call":
        return [{"role": "assistant", "content": None, "tool_calls": _calls(fields, index)}]
    if fields.get("type") in RESULTS:
        return [_result(fields.get("call_id"), fields.get("output"), index)]
    if fields.get("type") in THOUGHT:
        return []
    content = fields.get("content")
    blocks = content if isinstance(content, list) else []
    results = [_result(one.get("tool_use_id"), one.get("content"), index) for one in _of_type(blocks, "tool_result")]
    text = _content(content, role, index)
    if results and text is None:
        return results
    made: Message = {"role": role, "content": text}
    if role == "assistant" and (calls := _calls(fields, index)):
        made["tool_calls"] = calls
    called = fields.get("tool_call_id")
    if role == "tool" and called is None and isinstance(fields.get("name"), str):
        called = _function_id(fields["name"])  # from before tools: a result names its function
    told = {"tool_call_id": called, "name": fields.get("name")}
    return [*results, made | {key: value for key, value in told.items() if isinstance(value, str)}]


def tools_of(tools: Any) -> list[Tool]:
    """Tools as OpenAI's chat form has them; those without a name are left out, as a provider runs them itself."""
    made = []
    for tool in tools if isinstance(tools, list) else []:
        if not isinstance(tool, Mapping):
            continue
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        if "function" in tool:
            made.append(dict(tool))
            continue
        schema = function.get("parameters", function.get("input_schema"))
        about = {"description": function["description"]} if function.get("description") else {}
        parameters = {"parameters": schema} if schema is not None else {}
        made.append({"type": "function", "function": {"name": function["name"], **about, **parameters}})
    return made


def kind(value: Any) -> str:
    """What a value is, in a word."""
    return "null" if value is None else type(value).__name__


def _unwrapped(message: Any, index: int) -> tuple[Fields, str]:
    """The fields of a message, whatever is wrapped around them, and its role."""
    if not isinstance(message, Mapping):
        raise Damage(f"message {index} has to be an object, found {kind(message)}")
    fields, named = message, message.get("role")
    if "lc" in message and isinstance(message.get("kwargs"), Mapping):
        fields = message["kwargs"]
        path = message.get("id")
        last = str(path[-1]) if isinstance(path, list) and path else ""
        named = fields.get("role") or last.removesuffix("Chunk").removesuffix("Message").lower()
    elif isinstance(message.get("data"), Mapping) and "role" not in message:
        fields = message["data"]
        named = fields.get("role") or message.get("type")
    elif named is None:
        named = message.get("type")
    if fields.get("type") in ("function_call", *RESULTS, *THOUGHT):
        named = "assistant"
    role = ROLES.get(str(named).removesuffix("MessageChunk").lower())
    if role is None:
        raise Damage(f"message {index} has no role of {', '.join(sorted(set(ROLES.values())))}: found {named!r:.60}")
    return fields, role


def _is_item(message: Any) -> bool:
    """Whether it is an item of the responses form, where every call stands for itself."""
    return isinstance(message, Mapping) and message.get("type") == "function_call"


def _of_type(blocks: Sequence[Any], name: str) -> list[Fields]:
    return [block for block in blocks if isinstance(block, Mapping) and block.get("type") == name]


def _result(call: Any, output: Any, index: int) -> Message:
    return {"role": "tool", "content": _content(output, "tool", index), "tool_call_id": str(call or "")}


def _content(content: Any, role: str, index: int) -> str | None:
    """Content as text; None where there is none."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_part(part) for part in content):
        said = [text for part in content if (text := _part(part)) is not None]
        return "\n".join(said) if said else None
    if role == "tool":
        return _json(content)
    raise Damage(f"message {index} has content that is no text but {kind(content)}")


def _is_part(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("type"), str))


def _part(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    name = part["type"]
    if name in (*THOUGHT, "tool_use", "tool_call", "tool_result", "function_call"):
        return None
    text = part.get("text") if name in TEXT else part.get("refusal")
    return text if isinstance(text, str) else f"[{name}]"


def _calls(fields: Fields, index: int) -> list[dict[str, Any]]:
    """The tool calls of a message, of the first place that has any."""
    more = fields.get("additional_kwargs")
    content = fields.get("content")
    blocks = _of_type(content, "tool_use") if isinstance(content, list) else []
    if fields.get("type") == "function_call":
        return [_call({**fields, "id": fields.get("call_id")}, index)]
    for place in (fields, more if isinstance(more, Mapping) else {}):
        invalid = place.get("invalid_tool_calls") or []
        if place.get("tool_calls") or invalid:
            calls = place.get("tool_calls") or []
            together = calls if not invalid else [*calls, *invalid] if isinstance(calls, list) else calls
            return [_call(call, index) for call in (together if isinstance(together, list) else [together])]
        if isinstance(old := place.get("function_call"), Mapping):
            return [_call({"id": _function_id(str(old.get("name"))), "function": old}, index)]
    return [_call({**block, "arguments": block.get("input")}, index) for block in blocks]


def _call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Damage(f"message {index} has a tool call without a name")
    arguments = function.get("arguments", function.get("args"))
    text = arguments if isinstance(arguments, str) else _json({} if arguments is None else arguments)
    function = {"name": function["name"], "arguments": text}
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}


def _function_id(name: str) -> str:
    return f"call_{name}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
