"""Describes the records of a world in a prompt: for each tool the calls that it answers, and the values of its answers.

A file reads the records when it runs; the summary shows its author what they contain. Not covered: answers that are no
JSON, and values below ``MAX_DEPTH`` levels.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from agents.synthesizer.llm.shapes import MAP_KEY, clipped, is_map

# Calls listed of a tool, and characters of each.
MAX_CALLS = 10
MAX_CALL = 160
# A field with more distinct values is described by their number and two of them.
MAX_VALUES = 8
MAX_VALUE = 60
MAX_PATHS = 60
MAX_DEPTH = 6


def world_text(data: Mapping[str, Any]) -> str:
    """Return one line of JSON per tool of a world's data (``agents.world.runtime``)."""
    return "\n".join(json.dumps(_tool(data, tool), ensure_ascii=False) for tool in data["calls"])


def _tool(data: Mapping[str, Any], tool: str) -> dict[str, object]:
    calls = data["calls"][tool]
    answers = {
        arguments: next((text for history, text, failed in entries if not history and not failed), None)
        for arguments, entries in calls.items()
    }
    keys = [arguments for arguments, text in answers.items() if text is not None]
    description: dict[str, object] = {"tool": tool, "writes": tool in data["writes"], "records": len(keys)}
    if tool in data["constants"] or tool in data["computed"]:
        return description | {"answers": "every call"}
    description["calls"] = [clipped(arguments, MAX_CALL) for arguments in keys[:MAX_CALLS]]
    if tool not in data["writes"]:
        description["values"] = _values([text for text in answers.values() if text is not None])
    return description


def _values(texts: list[str]) -> dict[str, object]:
    """Return path -> the values with their counts, or the number of distinct values and two of them."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for text in texts:
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            continue
        for path, value in _leaves(answer, "", MAX_DEPTH):
            counts[path][value] += 1
    return {path: _description(values) for path, values in list(counts.items())[:MAX_PATHS]}


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and depth:
        for key, part in value.items():
            name = MAP_KEY if is_map(value) else clipped(str(key), MAX_VALUE)
            yield from _leaves(part, f"{path}.{name}" if path else name, depth - 1)
    elif isinstance(value, list) and depth:
        yield f"number of {path}" if path else "number", str(len(value))
        for part in value:
            yield from _leaves(part, f"{path}[]", depth - 1)
    else:
        yield path, clipped(value if isinstance(value, str) else json.dumps(value), MAX_VALUE)


def _description(values: Counter[str]) -> object:
    if len(values) <= MAX_VALUES:
        return dict(sorted(values.items()))
    return f"{len(values)} distinct, such as {', '.join(sorted(values)[:2])}"
