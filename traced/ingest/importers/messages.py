"""Convert the messages of every supported format to OpenAI chat messages, and tools to OpenAI function tools.

The supported inputs are OpenAI's chat messages and response items, Anthropic's content blocks, LangChain's serialized
messages, and the inputs and outputs that the LangSmith and Langfuse integrations record. Converted messages have the
roles system, user, assistant and tool, content that is text or None, and arguments that are JSON text; converting them
again changes nothing. Content that is not text is replaced by its type in brackets, such as ``[image_url]``. Errors:
RecordFormatError with the index of the message. Not covered: images, sound and files; tools that a provider runs.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from store.types import Message, Tool
from traced.ingest.importers.errors import RecordFormatError

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "ai", "model"), "assistant"),
    **dict.fromkeys(("tool", "function"), "tool"),
}
TEXT_TYPES = ("text", "input_text", "output_text")
REASONING_TYPES = ("thinking", "redacted_thinking", "reasoning", "reasoning_content")
RESULT_TYPES = ("function_call_output", "custom_tool_call_output")

Fields = Mapping[str, Any]


def chat_messages(messages: object) -> list[Message]:
    """Convert a conversation; raises RecordFormatError."""
    if not isinstance(messages, list):
        raise RecordFormatError(f"messages have to be a list, found {type_name(messages)}")
    converted: list[Message] = []
    for index, message in enumerate(messages):
        for part in read_message(message, index):
            previous = converted[-1] if converted else {}
            # The responses form has an item for every tool call, the chat form one message with all of them.
            if _is_item(message) and part["role"] == "assistant" == previous.get("role") and "tool_calls" in part:
                previous["tool_calls"] = [*previous.get("tool_calls", []), *part["tool_calls"]]
            else:
                converted.append(part)
    return converted


def read_message(message: object, index: int) -> list[Message]:
    """Convert one message: to several if it holds tool results, to none if it is only reasoning.

    Args:
        index: The message's index in the conversation, for error messages.

    Raises:
        RecordFormatError: The message is invalid.
    """
    fields, role = _unwrap(message, index)
    if fields.get("type") == "function_call":
        return [{"role": "assistant", "content": None, "tool_calls": _calls(fields, index)}]
    if fields.get("type") in RESULT_TYPES:
        return [_result(fields.get("call_id"), fields.get("output"), index)]
    # Reasoning is not sent back to the model, so it is not part of the conversation.
    if fields.get("type") in REASONING_TYPES:
        return []
    content = fields.get("content")
    blocks = content if isinstance(content, list) else []
    results = [
        _result(block.get("tool_use_id"), block.get("content"), index) for block in _of_type(blocks, "tool_result")
    ]
    text = _content(content, role, index)
    if results and text is None:
        return results
    converted: Message = {"role": role, "content": text}
    if role == "assistant" and (calls := _calls(fields, index)):
        converted["tool_calls"] = calls
    call_id = fields.get("tool_call_id")
    # In OpenAI's older function API, a result names its function instead of its call.
    if role == "tool" and call_id is None and isinstance(fields.get("name"), str):
        call_id = _function_id(fields["name"])
    ids = {"tool_call_id": call_id, "name": fields.get("name")}
    return [*results, converted | {key: value for key, value in ids.items() if isinstance(value, str)}]


def tools_of(tools: object) -> list[Tool]:
    """Convert tool definitions to OpenAI function tools."""
    converted = []
    for tool in tools if isinstance(tools, list) else []:
        if not isinstance(tool, Mapping):
            continue
        function = tool.get("function", tool)
        # Tools without a name are run by the provider and have no definition.
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        if "function" in tool:
            converted.append(dict(tool))
            continue
        schema = function.get("parameters", function.get("input_schema"))
        description = {"description": function["description"]} if function.get("description") else {}
        parameters = {"parameters": schema} if schema is not None else {}
        converted.append({"type": "function", "function": {"name": function["name"], **description, **parameters}})
    return converted


def read_input(payload: object) -> tuple[list[Message], list[Tool]]:
    """Return the messages and the tools in the recorded input of a model call; raises RecordFormatError."""
    payload = _parsed_json(payload)
    if isinstance(payload, str):
        return [{"role": "user", "content": payload}], []
    if isinstance(payload, list):
        payload = {"messages": payload}
    if not isinstance(payload, Mapping):
        raise RecordFormatError(f"the input of the call is not a conversation but {type_name(payload)}")
    tools = tools_of(payload.get("tools")) or tools_of(payload.get("functions"))
    messages = _input_messages(payload)
    # LangChain records a list of conversations, a batch with one element.
    if messages and isinstance(messages[0], list):
        messages = messages[0]
    definitions = [tool for message in messages for tool in _tool_definition(message)]
    conversation = chat_messages([message for message in messages if not _tool_definition(message)])
    system = payload.get("system", payload.get("instructions"))
    if system and not (conversation and conversation[0]["role"] == "system"):
        conversation = [*chat_messages([{"role": "system", "content": system}]), *conversation]
    if not conversation:
        raise RecordFormatError("the input of the call holds no messages")
    return conversation, tools or tools_of(definitions)


def read_output(payload: object) -> Message | None:
    """Return the assistant's message in the recorded output of a model call, its parts joined, or None.

    Raises:
        RecordFormatError: The output is not a message.
    """
    replies = [
        message for message in chat_messages(_output_messages(_parsed_json(payload))) if message["role"] == "assistant"
    ]
    if not replies:
        return None
    texts = [message["content"] for message in replies if message["content"]]
    calls = [call for message in replies for call in message.get("tool_calls", [])]
    reply: Message = {"role": "assistant", "content": "\n".join(texts) if texts else replies[-1]["content"]}
    return {**reply, "tool_calls": calls} if calls else reply


def type_name(value: object) -> str:
    """Return the name of a JSON value's type, for error messages."""
    return "null" if value is None else type(value).__name__


def _unwrap(message: object, index: int) -> tuple[Fields, str]:
    """Return the fields of a message without LangChain's wrappers, and its role."""
    if not isinstance(message, Mapping):
        raise RecordFormatError(f"message {index} has to be an object, found {type_name(message)}")
    fields, role_name = message, message.get("role")
    # LangChain's dumps(): {"lc": 1, "id": [..., "HumanMessage"], "kwargs": {...}}.
    if "lc" in message and isinstance(message.get("kwargs"), Mapping):
        fields = message["kwargs"]
        path = message.get("id")
        last = str(path[-1]) if isinstance(path, list) and path else ""
        role_name = fields.get("role") or last.removesuffix("Chunk").removesuffix("Message").lower()
    # LangChain's message_to_dict(): {"type": "human", "data": {...}}.
    elif isinstance(message.get("data"), Mapping) and "role" not in message:
        fields = message["data"]
        role_name = fields.get("role") or message.get("type")
    elif role_name is None:
        role_name = message.get("type")
    if fields.get("type") in ("function_call", *RESULT_TYPES, *REASONING_TYPES):
        role_name = "assistant"
    role = ROLES.get(str(role_name).removesuffix("MessageChunk").lower())
    if role is None:
        raise RecordFormatError(
            f"message {index} has no known role ({', '.join(sorted(set(ROLES.values())))}): found {role_name!r:.60}"
        )
    return fields, role


def _is_item(message: object) -> bool:
    """Return whether a message is a function call of the responses form, which has one item per call."""
    return isinstance(message, Mapping) and message.get("type") == "function_call"


def _of_type(blocks: Sequence[Any], name: str) -> list[Fields]:
    return [block for block in blocks if isinstance(block, Mapping) and block.get("type") == name]


def _result(call_id: object, output: object, index: int) -> Message:
    return {"role": "tool", "content": _content(output, "tool", index), "tool_call_id": str(call_id or "")}


def _content(content: object, role: str, index: int) -> str | None:
    """Return content as text, or None if it holds no text."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_part(part) for part in content):
        texts = [text for part in content if (text := _part(part)) is not None]
        return "\n".join(texts) if texts else None
    if role == "tool":
        return _json(content)
    raise RecordFormatError(f"message {index} has content that is not text but {type_name(content)}")


def _is_part(part: object) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("type"), str))


def _part(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    name = part["type"]
    if name in (*REASONING_TYPES, "tool_use", "tool_call", "tool_result", "function_call"):
        return None
    text = part.get("text") if name in TEXT_TYPES else part.get("refusal")
    return text if isinstance(text, str) else f"[{name}]"


def _calls(fields: Fields, index: int) -> list[dict[str, Any]]:
    """Return the tool calls of a message from any of the places where the formats keep them."""
    extra = fields.get("additional_kwargs")
    content = fields.get("content")
    blocks = _of_type(content, "tool_use") if isinstance(content, list) else []
    if fields.get("type") == "function_call":
        return [_call({**fields, "id": fields.get("call_id")}, index)]
    for source in (fields, extra if isinstance(extra, Mapping) else {}):
        # LangChain keeps calls with invalid JSON arguments in a separate field; they are calls of the model as well.
        invalid = source.get("invalid_tool_calls") or []
        calls = source.get("tool_calls") or []
        if calls or invalid:
            # A single call that is not in a list is invalid in every format; _call raises the error.
            return [_call(call, index) for call in ([*calls, *invalid] if isinstance(calls, list) else [calls])]
        if isinstance(legacy_call := source.get("function_call"), Mapping):
            return [_call({"id": _function_id(str(legacy_call.get("name"))), "function": legacy_call}, index)]
    return [_call({**block, "arguments": block.get("input")}, index) for block in blocks]


def _call(call: object, index: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RecordFormatError(f"message {index} has a tool call without a name")
    arguments = function.get("arguments", function.get("args"))
    text = arguments if isinstance(arguments, str) else _json({} if arguments is None else arguments)
    function = {"name": function["name"], "arguments": text}
    return {"id": str(call.get("id") or ""), "type": "function", "function": function}


def _function_id(name: str) -> str:
    return f"call_{name}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _input_messages(payload: Fields) -> list[Any]:
    for name in ("messages", "input", "prompts", "prompt"):
        value = _parsed_json(payload.get(name))
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        if isinstance(value, list) and value:
            return [{"role": "user", "content": prompt} for prompt in value[:1]] if isinstance(value[0], str) else value
        if isinstance(value, Mapping):
            return _input_messages(value)
    if "role" in payload or "lc" in payload:
        return [payload]
    raise RecordFormatError(
        f"the input of the call holds no messages, only: {', '.join(sorted(map(str, payload))[:8]) or 'nothing'}"
    )


def _tool_definition(message: object) -> list[Any]:
    # Langfuse's LangChain callback appends the tool definitions to the messages, as messages with the role tool.
    if not isinstance(message, Mapping) or message.get("role") != "tool" or "tool_call_id" in message:
        return []
    content = message.get("content")
    return [content] if isinstance(content, Mapping) and "function" in content else []


def _output_messages(payload: object) -> list[Any]:
    if payload is None or payload == "":
        return []
    if isinstance(payload, str):
        return [{"role": "assistant", "content": payload}]
    if isinstance(payload, list):
        return [message for piece in payload for message in _output_messages(piece)]
    if not isinstance(payload, Mapping):
        raise RecordFormatError(f"the output of the call is not a message but {type_name(payload)}")
    # LangChain has a list of generations for each prompt; of several choices the first is used.
    for name in ("generations", "choices"):
        if isinstance(payload.get(name), list):
            first = payload[name][0] if payload[name] else None
            return _output_messages(first[0] if isinstance(first, list) and first else first)
    if "lc" in payload or payload.get("type") in ("function_call", "reasoning", "message", "ai", "AIMessageChunk"):
        return [payload]
    if isinstance(payload.get("message"), Mapping):
        return _output_messages(payload["message"])
    # The payload is an agent's state, whose last message is the answer.
    if isinstance(payload.get("messages"), list):
        return _output_messages(payload["messages"][-1:])
    if "output" in payload:
        return _output_messages(_parsed_json(payload["output"]))
    if "content" in payload or "tool_calls" in payload or "function_call" in payload:
        return [{**payload, "role": payload.get("role") or "assistant"}]
    return _output_messages(payload.get("text", payload.get("completion")))


def _parsed_json(value: object) -> Any:
    """Parse text that is a JSON object or list; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
