"""Anthropic's Messages form as chat messages: system, content blocks and tools.

A ``tool_use`` block becomes a tool call with the JSON text of its input as arguments; a ``tool_result`` block becomes
a tool message before the rest of its message. So an answer and the blocks that a client sends back later give the same
message. Left out: thinking, and calls of tools that a provider runs.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from sandbox.contract import Message, Tool
from traced.inference.forms.content import Fields, flat_text, known_objects, objects

# Claude Code sends a hash that changes with every request; vLLM leaves it out of the prompt as well.
BILLING_HEADER = "x-anthropic-billing-header"


def chat_messages(request: Fields) -> list[Message]:
    """Return the messages of a request; raises ``ValueError`` if ``messages`` is not a list of objects."""
    messages: list[Message] = []
    if system := _system_text(request.get("system")):
        messages.append({"role": "system", "content": system})
    for message in objects(request.get("messages"), "messages"):
        messages += _messages(message)
    return messages


def answer_message(content: Iterable[Fields]) -> Message:
    """Return the message in the content blocks of an answer."""
    blocks = list(content)
    text = "".join(flat_text(block.get("text")) for block in blocks if block.get("type") == "text")
    calls = [
        {"id": block.get("id"), "type": "function", "function": _function(block)}
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    message: Message = {"role": "assistant", "content": text or None}
    return {**message, "tool_calls": calls} if calls else message


def chat_tools(tools: Iterable[Fields]) -> list[Tool]:
    """Return the tools of a request in the chat form; tools that a provider runs have no schema and are left out."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                **({"description": tool["description"]} if tool.get("description") else {}),
                "parameters": tool["input_schema"],
            },
        }
        for tool in tools
        if "input_schema" in tool
    ]


def assembled(events: Iterable[Fields]) -> dict[str, Any]:
    """Return the answer that a stream's events describe; of a stream that broke off, the part that arrived."""
    answer: dict[str, Any] = {"type": "message", "content": [], "usage": {}}
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        kind, index = event.get("type"), event.get("index", 0)
        if kind == "message_start":
            answer |= {key: value for key, value in event["message"].items() if key != "content"}
        elif kind == "content_block_start":
            blocks[index] = dict(event["content_block"])
        elif kind == "content_block_delta":
            _extend(blocks[index], event["delta"])
        elif kind == "message_delta":
            answer["usage"] = {**(answer["usage"] or {}), **(event.get("usage") or {})}
            answer |= event["delta"]
    answer["content"] = [_complete(blocks[index]) for index in sorted(blocks)]
    return answer


def _messages(message: dict[str, Any]) -> Iterator[Message]:
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        yield {"role": role, "content": content} if isinstance(content, str) else answer_message(known_objects(content))
    elif role == "system":
        if text := _system_text(content):
            yield {"role": role, "content": text}
    elif not isinstance(content, list):
        yield {"role": role, "content": flat_text(content)}
    else:
        results = [block for block in known_objects(content) if block.get("type") == "tool_result"]
        for result in results:
            text = flat_text(result.get("content"))
            yield {"role": "tool", "tool_call_id": result.get("tool_use_id"), "content": text}
        if rest := [block for block in content if block not in results]:
            yield {"role": role, "content": flat_text(rest)}


def _system_text(system: object) -> str:
    if isinstance(system, str):
        return "" if system.startswith(BILLING_HEADER) else system
    texts = [flat_text(block.get("text")) for block in known_objects(system)]
    return "".join(text for text in texts if not text.startswith(BILLING_HEADER))


def _function(block: Fields) -> dict[str, Any]:
    arguments = block.get("input")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"name": block.get("name"), "arguments": text}


def _extend(block: dict[str, Any], delta: Fields) -> None:
    if delta.get("type") == "text_delta":
        block["text"] = (block.get("text") or "") + delta["text"]
    elif delta.get("type") == "input_json_delta":
        block["json"] = block.get("json", "") + delta["partial_json"]


def _complete(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block of a stream as in a whole answer; arguments that broke off stay text."""
    text = block.pop("json", "")
    if text:
        try:
            block["input"] = json.loads(text)
        except ValueError:
            block["input"] = text
    return block
