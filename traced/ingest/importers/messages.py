"""Messages of every form that the formats hold, as OpenAI chat messages: the one place that converts them.

Read are OpenAI's chat messages (with functions as they were before tools), the items of its responses form, Anthropic's
content blocks, LangChain's messages in its three serialised forms, and what Langfuse's and LangSmith's own integrations
make of them. Taken over is what an agent in production sees: role, text, tool calls, ids and names.

Invariants: roles are system, user, assistant and tool; content is text or None; arguments of calls are JSON text, those
that were text already are left as they are; converting again changes nothing. Parts of content that are no text leave
``[image_url]`` and the like; what a model thought is left out, as it is not sent back.
How it fails: ``Damage`` names the message (counted from 0) and what is wrong with it.
Not covered: images, sound and files themselves; tools that a provider runs on its own side.

What was asked of a model and what it answered, out of the inputs and outputs that tracers record.

Read are the forms that LangSmith's and Langfuse's own integrations write: LangChain's prompts and generations, OpenAI's
chat, responses and text completions, Anthropic's messages, plain texts, and any of these as JSON in a text.
Fails: ``Damage`` where there is no conversation. Not covered: embeddings and other calls that hold none.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from store.types import Message, Tool
from traced.ingest.importers.errors import Damage

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


def asked(told: Any) -> tuple[list[Message], list[Tool]]:
    """The messages of a call, and the tools it was offered where they are told beside them."""
    told = _parsed(told)
    if isinstance(told, str):
        return [{"role": "user", "content": told}], []
    if isinstance(told, list):
        told = {"messages": told}
    if not isinstance(told, Mapping):
        raise Damage(f"the call's input holds no conversation: it is {kind(told)}")
    tools = tools_of(told.get("tools")) or tools_of(told.get("functions"))
    messages = _messages(told)
    if messages and isinstance(messages[0], list):  # LangChain's batch of one
        messages = messages[0]
    offered = [tool for message in messages for tool in _definition(message)]
    made = chat([message for message in messages if not _definition(message)])
    system = told.get("system", told.get("instructions"))
    if system and not (made and made[0]["role"] == "system"):
        made = [*chat([{"role": "system", "content": system}]), *made]
    if not made:
        raise Damage("the call's input holds no messages")
    return made, tools or tools_of(offered)


def answer(told: Any) -> Message | None:
    """The assistant's message, put together where it comes in several pieces; None where there is none."""
    said = [message for message in chat(_pieces(_parsed(told))) if message["role"] == "assistant"]
    if not said:
        return None
    texts = [message["content"] for message in said if message["content"]]
    calls = [call for message in said for call in message.get("tool_calls", [])]
    made: Message = {"role": "assistant", "content": "\n".join(texts) if texts else said[-1]["content"]}
    return {**made, "tool_calls": calls} if calls else made


def _messages(told: Mapping[str, Any]) -> list[Any]:
    for name in ("messages", "input", "prompts", "prompt"):
        found = _parsed(told.get(name))
        if isinstance(found, str):
            return [{"role": "user", "content": found}]
        if isinstance(found, list) and found:
            return [{"role": "user", "content": one} for one in found[:1]] if isinstance(found[0], str) else found
        if isinstance(found, Mapping):
            return _messages(found)
    if "role" in told or "lc" in told:
        return [told]
    raise Damage(f"the call's input holds no messages, only: {', '.join(sorted(map(str, told))[:8]) or 'nothing'}")


def _definition(message: Any) -> list[Any]:
    """Langfuse's LangChain callback puts the definitions of tools behind the messages, as messages of a tool."""
    content = message.get("content") if isinstance(message, Mapping) and message.get("role") == "tool" else None
    if isinstance(content, Mapping) and "tool_call_id" not in message and "function" in content:
        return [content]
    return []


def _pieces(told: Any) -> list[Any]:
    """The messages of an answer."""
    if told is None or told == "":
        return []
    if isinstance(told, str):
        return [{"role": "assistant", "content": told}]
    if isinstance(told, list):
        return [piece for one in told for piece in _pieces(one)]
    if not isinstance(told, Mapping):
        raise Damage(f"the call's output is no message but {kind(told)}")
    for name in ("generations", "choices"):  # LangChain has a list for each prompt; the first choice counts
        if isinstance(told.get(name), list):
            first = told[name][0] if told[name] else None
            return _pieces(first[0] if isinstance(first, list) and first else first)
    if "lc" in told or told.get("type") in ("function_call", "reasoning", "message", "ai", "AIMessageChunk"):
        return [told]
    if isinstance(told.get("message"), Mapping):
        return _pieces(told["message"])
    if isinstance(told.get("messages"), list):
        return _pieces(told["messages"][-1:])
    if "output" in told:
        return _pieces(_parsed(told["output"]))
    if "content" in told or "tool_calls" in told or "function_call" in told:
        return [{**told, "role": told.get("role") or "assistant"}]
    return _pieces(told.get("text", told.get("completion")))


def _parsed(told: Any) -> Any:
    """What a text holds, where it is JSON of an object or a list."""
    if isinstance(told, str) and told.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(told)
        except (ValueError, RecursionError):
            return told
    return told
