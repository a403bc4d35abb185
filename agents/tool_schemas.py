"""The tools of a target as its conversations have them: their schemas, and what a tool's name says about it."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from agents.transcript import Transcript, tool_function
from store.types import Tool

_READ_VERB = re.compile(
    "get|find|list|search|lookup|look|check|read|view|show|fetch|query|retrieve|describe|count|calculate|compute|think"
    "|convert|verify|examine|inspect"
)


def is_read(tool: str) -> bool:
    """Return whether a tool only reads, by the verb in its name."""
    return _READ_VERB.fullmatch(tool.lower().split("_")[0]) is not None


def merged_tools(transcripts: Iterable[Transcript]) -> list[Tool]:
    """Return every tool's most frequent schema, in order of appearance.

    Tools without a schema get one that is derived from their calls.
    """
    schema_counts: dict[str, Counter[str]] = {}
    calls: dict[str, list[dict[str, object]]] = defaultdict(list)
    for transcript in transcripts:
        for tool in transcript.tools:
            function = tool_function(tool)
            wrapped = {"type": "function", "function": function}
            schema_counts.setdefault(str(function.get("name", "")), Counter())[
                json.dumps(wrapped, ensure_ascii=False)
            ] += 1
        for call in transcript.calls:
            if call.succeeded and call.arguments is not None:
                calls[call.name].append(call.arguments)
    declared = [json.loads(versions.most_common(1)[0][0]) for versions in schema_counts.values()]
    return declared + [_schema_of_calls(name, calls[name]) for name in sorted(calls) if name not in schema_counts]


def _schema_of_calls(name: str, calls: list[dict[str, object]]) -> Tool:
    """Return a schema derived from recorded arguments; those that every call gives are required."""
    properties: dict[str, object] = {}
    for arguments in calls:
        for argument, value in arguments.items():
            properties.setdefault(argument, {"type": _json_type(value)})
    required = [argument for argument in properties if all(argument in arguments for arguments in calls)]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def _json_type(value: object) -> str:
    kinds = {bool: "boolean", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "number")
