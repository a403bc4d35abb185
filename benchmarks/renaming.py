"""Conversations in another language: each letter is replaced by another one, consistently in a whole conversation.

So no English word is left, but equal words stay equal and a word that continues another one still does, as plurals do.
``NAMES`` renames tools, parameters and the keys of results; ``TEXTS`` renames all strings as well: messages, values and
descriptions. Kept are JSON Schema's words, the keys by which programs report errors (``PROTOCOL``) and a leading
``Error`` of an answer.
"""

import codecs
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from store.types import Message, Tool, Trajectory

NAMES, TEXTS = "names", "texts"
PROTOCOL = {"error", "errors", "success", "ok", "status"}


def renamed(trajectory: Trajectory, parts: str) -> Trajectory:
    """Return a trajectory with other names (``NAMES``) or other names and texts (``TEXTS``)."""
    text = _rotate if parts == TEXTS else str
    return replace(
        trajectory,
        messages=[_message(message, text) for message in trajectory.messages],
        tools=[_tool(tool, text) for tool in trajectory.tools],
    )


def _rotate(text: str) -> str:
    return codecs.encode(text, "rot13")


def _message(message: Message, text: Callable[[str], str]) -> Message:
    new = dict(message)
    if isinstance(message.get("content"), str):
        new["content"] = _result(message["content"], text) if message["role"] == "tool" else text(message["content"])
    if message.get("tool_calls"):
        new["tool_calls"] = [_call(call, text) for call in message["tool_calls"]]
    if message["role"] == "tool" and "name" in message:
        new["name"] = _rotate(message["name"])
    return new


def _call(call: dict[str, Any], text: Callable[[str], str]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.dumps(_value(json.loads(function["arguments"]), text))
    except ValueError:
        arguments = text(function["arguments"])
    return {**call, "function": {"name": _rotate(function["name"]), "arguments": arguments}}


def _result(content: str, text: Callable[[str], str]) -> str:
    try:
        return json.dumps(_value(json.loads(content), text))
    except ValueError:
        start = 5 if content.lower().startswith("error") else 0
        return content[:start] + text(content[start:])


def _value(value: Any, text: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {key if key in PROTOCOL else _rotate(key): _value(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [_value(item, text) for item in value]
    return text(value) if isinstance(value, str) else value


def _tool(tool: Tool, text: Callable[[str], str]) -> Tool:
    if "function" in tool:
        return {**tool, "function": _tool(tool["function"], text)}
    new = {**tool, "name": _rotate(tool["name"]), "description": text(str(tool.get("description", "")))}
    return new | {"parameters": _schema(tool.get("parameters") or {}, text)}


def _schema(schema: dict[str, Any], text: Callable[[str], str]) -> dict[str, Any]:
    new = dict(schema)
    if "properties" in schema:
        new["properties"] = {_rotate(key): _schema(item, text) for key, item in schema["properties"].items()}
    if "required" in schema:
        new["required"] = [_rotate(key) for key in schema["required"]]
    if "items" in schema:
        new["items"] = _schema(schema["items"], text)
    if "enum" in schema:
        new["enum"] = [_value(value, text) for value in schema["enum"]]
    if "description" in schema:
        new["description"] = text(str(schema["description"]))
    return new
