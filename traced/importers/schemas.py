"""Tool schemas inferred from recorded calls, for files that keep the calls but not the tools.

Invariants: a schema names every argument seen and its JSON types; an argument is required when every call had it; the
tool carries ``"x-inferred": true`` and its description says from how many calls it was inferred.
Calls whose arguments are no JSON object count for the tool's name only.
Not covered: enumerations, formats, and what no call happened to use.
"""

import json
from collections.abc import Iterable
from typing import Any

from store.types import Message, Tool

Schema = dict[str, Any]
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class ToolInference:
    """Collects the calls of one file; ``tools`` says what they tell."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._parameters: dict[str, Schema] = {}

    def observe(self, messages: Iterable[Message]) -> None:
        """Take in the calls of a trajectory."""
        for call in (call for message in messages for call in message.get("tool_calls") or []):
            name = call["function"]["name"]
            self._calls[name] = self._calls.get(name, 0) + 1
            arguments = _parsed(call["function"]["arguments"])
            if isinstance(arguments, dict):
                known, seen = self._parameters.get(name), infer(arguments)
                self._parameters[name] = seen if known is None else merge(known, seen)

    def tools(self) -> list[Tool]:
        """The tools called, by name, as OpenAI schemas."""
        return [self._tool(name) for name in sorted(self._calls)]

    def _tool(self, name: str) -> Tool:
        parameters = self._parameters.get(name, infer({}))
        description = f"Inferred from {self._calls[name]} recorded calls."
        function = {"name": name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function, "x-inferred": True}


def infer(value: Any) -> Schema:
    """The JSON schema of one value."""
    if isinstance(value, dict):
        properties = {key: infer(item) for key, item in sorted(value.items())}
        return {"type": "object", "properties": properties, "required": sorted(value)}
    if isinstance(value, list):
        items: Schema | None = None
        for item in value:
            items = infer(item) if items is None else merge(items, infer(item))
        return {"type": "array"} if items is None else {"type": "array", "items": items}
    return {"type": JSON_TYPES[type(value)]}


def merge(left: Schema, right: Schema) -> Schema:
    """The schema of values that fit either; commutative, associative and idempotent."""
    merged: Schema = {"type": _either(left["type"], right["type"])}
    objects = [schema for schema in (left, right) if "properties" in schema]
    if objects:
        merged["properties"] = _merge_properties(*(schema["properties"] for schema in objects))
        merged["required"] = sorted(set.intersection(*(set(schema["required"]) for schema in objects)))
    items = [schema["items"] for schema in (left, right) if "items" in schema]
    if items:
        merged["items"] = items[0] if len(items) == 1 else merge(*items)
    return merged


def _merge_properties(left: dict[str, Schema], right: dict[str, Schema] | None = None) -> dict[str, Schema]:
    right = right or {}
    both = sorted({*left, *right})
    return {key: merge(left.get(key) or right[key], right.get(key) or left[key]) for key in both}


def _either(left: str | list[str], right: str | list[str]) -> str | list[str]:
    kinds = {kind for side in (left, right) for kind in ([side] if isinstance(side, str) else side)}
    kinds -= {"integer"} if "number" in kinds else set()
    return kinds.pop() if len(kinds) == 1 else sorted(kinds)


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None
