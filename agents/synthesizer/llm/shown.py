"""What a target has shown to its agent, as text for a prompt: its policy, its tools, the state behind them, failures.

Invariants: only ``Trajectory.messages`` and ``tools`` are read, and of a message only what a chat shows (role, text,
calls), so neither rewards, parts, task ids nor the target's ground truth can come in; conversations are named by their
order ("t03"), because their ids may tell tasks. The same trajectories and labels give the same text. Nothing is
marked as data here (``prompt``). Not covered: images; what no recorded call has brought to light.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agents.synthesizer.builtin import majority
from agents.transcript import Call, tool_function, transcripts
from store.types import Label, Message, Outcome, Tool, Trajectory, Verdict

POLICIES = 3  # system messages that are shown; they may differ from task to task
POLICY = 4_000  # characters
RESULTS = 2  # answers of a tool with different fields
ERRORS = 3  # errors of a tool
ANSWER = 700
SPANS = 6  # failures that are shown
BEFORE, AFTER = 4, 2  # messages around the one that decided a label
SAID = 700
ARGUMENTS = 400
DEEP = 6  # levels of an answer whose fields are named
FIELDS = 40  # fields of one object that are named: records kept by their ids have as many as there are records


def policies(trajectories: Iterable[Trajectory]) -> list[str]:
    """The system messages that were seen most, each once."""
    seen = Counter(one.system for one in transcripts(list(trajectories)) if one.system.strip())
    return [clipped(text, POLICY) for text, _ in seen.most_common(POLICIES)]


def tools(trajectories: Iterable[Trajectory]) -> str:
    """Every tool's schema, one a line, in the order in which they were first offered."""
    found: dict[str, Tool] = {}
    for trajectory in trajectories:
        for tool in trajectory.tools:
            found.setdefault(str(tool_function(tool).get("name", "")), tool)
    return "\n".join(_json(tool) for tool in found.values())


def state(trajectories: Iterable[Trajectory]) -> str:
    """Tool by tool the fields of its answers, then answers and errors word for word, one a line."""
    calls: dict[str, list[Call]] = defaultdict(list)
    for one in transcripts(list(trajectories)):
        for call in one.calls:
            if call.result is not None:
                calls[call.name].append(call)
    return "\n".join(line for name, made in calls.items() for line in _of_tool(name, made))


def _of_tool(name: str, made: list[Call]) -> Iterator[str]:
    fields: Any = None
    shapes: dict[str, Call] = {}
    errors: dict[str, Call] = {}
    for call in made:
        if call.result is None:
            continue
        if call.result.error:
            errors.setdefault(call.result.text, call)
            continue
        own = _fields(call.result.value)
        fields = own if fields is None else _merged(fields, own)
        shapes.setdefault(_json(own), call)
    if fields is not None:
        yield _json({"tool": clipped(name, 80), "answers": fields})
    for call in [*list(shapes.values())[:RESULTS], *list(errors.values())[:ERRORS]]:
        answer = call.result.text if call.result is not None else ""
        yield _json(
            {"call": clipped(name, 80), "arguments": clipped(call.raw, ARGUMENTS)} | {"answer": clipped(answer, ANSWER)}
        )


def failures(trajectories: Sequence[Trajectory], labels: Iterable[Label], capability: str) -> list[str]:
    """What happened around the message that decided LACKING, in some of the failures that lacked the capability."""
    cited: dict[str, Counter[int]] = defaultdict(Counter)
    labels = list(labels)
    for label in labels:
        if label.capability == capability and label.verdict is Verdict.LACKING and label.message_index is not None:
            cited[label.trajectory_id][label.message_index] += 1
    verdicts = majority(labels, capability)
    lacking = [
        (number, one)
        for number, one in enumerate(trajectories)
        if one.outcome is Outcome.FAILURE and verdicts.get(one.id) is Verdict.LACKING
    ]
    every = max(1, len(lacking) // SPANS)
    return [_span(number, one, _decided(cited[one.id])) for number, one in lacking[::every][:SPANS]]


def _decided(cited: Mapping[int, int]) -> int | None:
    """The message that most runs cited, the earliest of several."""
    return min(cited, key=lambda index: (-cited[index], index), default=None)


def _span(number: int, trajectory: Trajectory, decided: int | None) -> str:
    """The opening, and the messages around ``decided`` (the last ones where no run cited any)."""
    last = len(trajectory.messages) - 1
    middle = last if decided is None else min(decided, last)
    opening = next((n for n, one in enumerate(trajectory.messages) if one.get("role") == "user"), 0)
    kept = sorted({opening, *range(max(0, middle - BEFORE), min(last, middle + AFTER) + 1)})
    lines = [f"conversation t{number:02d}, {last + 1} messages, of which these"]
    for index in kept:
        message = trajectory.messages[index]
        if message.get("role") not in ("system", "developer"):
            lines.append(_json({"m": index, **public(message), **({"lacking here": True} if index == decided else {})}))
    return "\n".join(lines)


def public(message: Message) -> dict[str, Any]:
    """Of a message what a chat shows."""
    calls = message.get("tool_calls")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    told = {
        "role": clipped(str(message.get("role")), 20),
        "content": clipped(content, SAID) if isinstance(content, str) else "",
        "calls": [_call(call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else [],
    }
    return {key: value for key, value in told.items() if value}


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    raw = function.get("arguments", "")
    arguments = clipped(raw if isinstance(raw, str) else _json(raw), ARGUMENTS)
    return f"{clipped(str(function.get('name', '')), 80)}({arguments})"


def _fields(value: Any, deep: int = DEEP) -> Any:
    """The form of an answer: its fields with the kinds of their values."""
    if isinstance(value, dict):
        named = list(value.items())[:FIELDS]
        return {clipped(str(key), 80): _fields(item, deep - 1) for key, item in named} if deep else "object"
    if isinstance(value, list):
        found: Any = None
        for item in value if deep else ():
            own = _fields(item, deep - 1)
            found = own if found is None else _merged(found, own)
        return [] if found is None else [found]
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "number"
    return "null" if value is None else "text"


def _merged(one: Any, other: Any) -> Any:
    """Both forms in one: all fields of both; "text or null" where a value has several kinds."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = {key: _merged(one[key], other[key]) for key in one if key in other}
        return dict(list({**one, **other, **both}.items())[:FIELDS])
    if isinstance(one, list) and isinstance(other, list):
        return [_merged(one[0], other[0])] if one and other else one or other
    if isinstance(one, str) and isinstance(other, str):
        return one if other in one.split(" or ") or one == other else f"{one} or {other}"
    return one if isinstance(one, dict | list) else other


def clipped(text: str, limit: int) -> str:
    """At most ``limit`` characters of a text, and how many were left out."""
    return text if len(text) <= limit else f"{text[:limit]}… (+{len(text) - limit} characters)"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
