"""OpenAI's Responses form as chat messages: instructions, input items, output items and tools.

Items of the assistant that follow one another are one message, as in the chat form: its texts are joined, and every
function call becomes one of its tool calls. So an answer and the items that a client sends back later give the same
message. Left out: reasoning, references to items, and calls of tools that a provider runs.
"""

import json
from collections.abc import Iterable
from typing import Any

from sandbox.contract import Message, Tool
from traced.inference.forms.content import Fields, flat_text, objects

CALL_TYPES = ("function_call", "custom_tool_call")
RESULT_TYPES = ("function_call_output", "custom_tool_call_output")
# A custom tool takes free text; vLLM shows it to the model as a function with this one parameter.
CUSTOM_INPUT = "input"
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
}


def input_items(request: Fields) -> list[dict[str, Any]]:
    """Return the input of a request as a list of items; raises ``ValueError`` if it is neither text nor items."""
    items = request.get("input")
    return [{"role": "user", "content": items}] if isinstance(items, str) else objects(items, "the items of input")


def chat_messages(request: Fields) -> list[Message]:
    """Return the messages of a request; raises ``ValueError`` if its input is neither text nor items."""
    instructions = request.get("instructions")
    system = [{"role": "system", "content": instructions}] if isinstance(instructions, str) and instructions else []
    return [*system, *messages_of_items(input_items(request))]


def messages_of_items(items: Iterable[Fields]) -> list[Message]:
    """Return the messages of input or output items."""
    messages: list[Message] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind in CALL_TYPES:
            _assistant(messages).setdefault("tool_calls", []).append(_call(item))
        elif kind in RESULT_TYPES:
            content = flat_text(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "message" and item.get("role", "assistant") == "assistant":
            message = _assistant(messages)
            message["content"] = (message["content"] or "") + flat_text(item.get("content"), "") or None
        elif kind == "message":
            messages.append({"role": item["role"], "content": flat_text(item.get("content"))})
    return messages


def answer_message(output: Iterable[Fields]) -> Message:
    """Return the message in the output of a response."""
    messages = messages_of_items(item for item in output if item.get("type") not in RESULT_TYPES)
    return messages[0] if messages else {"role": "assistant", "content": None}


def chat_tools(tools: Iterable[Fields]) -> list[Tool]:
    """Return the function tools of a request in the chat form; tools that a provider runs are left out."""
    converted: list[Tool] = []
    for tool in tools:
        fields = {key: value for key, value in tool.items() if key not in ("type", "format") and value is not None}
        if tool.get("type") == "function":
            converted.append({"type": "function", "function": tool.get("function", fields)})
        elif tool.get("type") == "custom":
            converted.append({"type": "function", "function": {**fields, "parameters": CUSTOM_PARAMETERS}})
    return converted


def _assistant(messages: list[Message]) -> Message:
    """Return the assistant's message at the end of the list, which is added if another role is there."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _call(item: Fields) -> dict[str, Any]:
    arguments = item.get("arguments")
    if item.get("type") == "custom_tool_call":
        arguments = json.dumps({CUSTOM_INPUT: item.get("input") or ""}, ensure_ascii=False)
    return {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": item.get("name"), "arguments": arguments},
    }
