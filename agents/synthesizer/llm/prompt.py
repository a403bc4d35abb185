"""The words with which a model is asked for an environment, and for a mended one.

Invariants: the same material gives the same bytes, because a request that was answered is found again by them; what
users, tools, analysts and environments wrote stands between marks, once, and what stands outside does not depend on it.
What a file is checked for is told by the caller (``Rules``), because agents know nothing of the sandbox but its
contract. Not covered: how much of it fits into a model's context; each part is clipped, tools and examples are not.

What a target has shown to its agent, as text for a prompt: its policy, its tools, the state behind them, failures.

Invariants: only ``Trajectory.messages`` and ``tools`` are read, and of a message only what a chat shows (role, text,
calls), so neither rewards, parts, task ids nor the target's ground truth can come in; conversations are named by their
order ("t03"), because their ids may tell tasks. The same trajectories and labels give the same text. Nothing is
marked as data here (``prompt``). Not covered: images; what no recorded call has brought to light.
"""

import inspect
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from agents.llm.question import IS_DATA, ChatMessage, marked
from agents.synthesizer.builtin import majority
from agents.synthesizer.llm.answer import holds_environment
from agents.transcript import Call, tool_function, transcripts
from sandbox import contract
from store.text import replace_surrogates
from store.types import Capability, Label, Message, Outcome, Tool, Trajectory, Verdict

MAX_POLICIES = 3  # system messages that are shown; they may differ from task to task
MAX_POLICY = 4_000  # characters
MAX_RESULTS = 2  # answers of a tool with different fields
MAX_ERRORS = 3  # errors of a tool
MAX_ANSWER = 700
MAX_SPANS = 6  # failures that are shown
MESSAGES_BEFORE, MESSAGES_AFTER = 4, 2  # messages around the one that decided a label
MAX_MESSAGE = 700
MAX_ARGUMENTS = 400
MAX_DEPTH = 6  # levels of an answer whose fields are named
MAX_FIELDS = 40  # fields of one object that are named: records kept by their ids have as many as there are records
MAX_SOURCE = 60_000  # characters of a refused file that are sent back
MAX_REPORT = 12_000
MAX_TEXT = 1_000  # of a capability


def frequent_policies(trajectories: Iterable[Trajectory]) -> list[str]:
    """The system messages that were seen most, each once."""
    counts = Counter(
        conversation.system for conversation in transcripts(list(trajectories)) if conversation.system.strip()
    )
    return [clipped(text, MAX_POLICY) for text, _ in counts.most_common(MAX_POLICIES)]


def tool_text(trajectories: Iterable[Trajectory]) -> str:
    """Every tool's schema, one a line, in the order in which they were first offered."""
    tools: dict[str, Tool] = {}
    for trajectory in trajectories:
        for tool in trajectory.tools:
            tools.setdefault(str(tool_function(tool).get("name", "")), tool)
    return "\n".join(_json(tool) for tool in tools.values())


def state_text(trajectories: Iterable[Trajectory]) -> str:
    """Tool by tool the fields of its answers, then answers and errors word for word, one a line."""
    calls: dict[str, list[Call]] = defaultdict(list)
    for conversation in transcripts(list(trajectories)):
        for call in conversation.calls:
            if call.result is not None:
                calls[call.name].append(call)
    return "\n".join(line for name, tool_calls in calls.items() for line in _tool_lines(name, tool_calls))


def _tool_lines(name: str, calls: list[Call]) -> Iterator[str]:
    fields: Any = None
    shapes: dict[str, Call] = {}
    errors: dict[str, Call] = {}
    for call in calls:
        if call.result is None:
            continue
        if call.result.error:
            errors.setdefault(call.result.text, call)
            continue
        shape = _fields(call.result.value)
        fields = shape if fields is None else _merged(fields, shape)
        shapes.setdefault(_json(shape), call)
    if fields is not None:
        yield _json({"tool": clipped(name, 80), "answers": fields})
    for call in [*list(shapes.values())[:MAX_RESULTS], *list(errors.values())[:MAX_ERRORS]]:
        answer = call.result.text if call.result is not None else ""
        yield _json(
            {"call": clipped(name, 80), "arguments": clipped(call.raw, MAX_ARGUMENTS)}
            | {"answer": clipped(answer, MAX_ANSWER)}
        )


def failure_texts(trajectories: Sequence[Trajectory], labels: Iterable[Label], capability: str) -> list[str]:
    """What happened around the message that decided LACKING, in some of the failures that lacked the capability."""
    citations: dict[str, Counter[int]] = defaultdict(Counter)
    labels = list(labels)
    for label in labels:
        if label.capability == capability and label.verdict is Verdict.LACKING and label.message_index is not None:
            citations[label.trajectory_id][label.message_index] += 1
    verdicts = majority(labels, capability)
    lacking_failures = [
        (number, trajectory)
        for number, trajectory in enumerate(trajectories)
        if trajectory.outcome is Outcome.FAILURE and verdicts.get(trajectory.id) is Verdict.LACKING
    ]
    step = max(1, len(lacking_failures) // MAX_SPANS)
    return [
        _span(number, trajectory, _deciding_message(citations[trajectory.id]))
        for number, trajectory in lacking_failures[::step][:MAX_SPANS]
    ]


def _deciding_message(votes: Mapping[int, int]) -> int | None:
    """The message that most runs cited, the earliest of several."""
    return min(votes, key=lambda index: (-votes[index], index), default=None)


def _span(number: int, trajectory: Trajectory, deciding: int | None) -> str:
    """The opening, and the messages around ``decided`` (the last ones where no run cited any)."""
    last = len(trajectory.messages) - 1
    middle = last if deciding is None else min(deciding, last)
    opening_index = next((n for n, message in enumerate(trajectory.messages) if message.get("role") == "user"), 0)
    indices = sorted({opening_index, *range(max(0, middle - MESSAGES_BEFORE), min(last, middle + MESSAGES_AFTER) + 1)})
    lines = [f"conversation t{number:02d}, {last + 1} messages, of which these"]
    for index in indices:
        message = trajectory.messages[index]
        if message.get("role") not in ("system", "developer"):
            lines.append(
                _json({"m": index, **public(message), **({"lacking here": True} if index == deciding else {})})
            )
    return "\n".join(lines)


def public(message: Message) -> dict[str, Any]:
    """Of a message what a chat shows."""
    calls = message.get("tool_calls")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    fields = {
        "role": clipped(str(message.get("role")), 20),
        "content": clipped(content, MAX_MESSAGE) if isinstance(content, str) else "",
        "calls": [_call(call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else [],
    }
    return {key: value for key, value in fields.items() if value}


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    raw = function.get("arguments", "")
    arguments = clipped(raw if isinstance(raw, str) else _json(raw), MAX_ARGUMENTS)
    return f"{clipped(str(function.get('name', '')), 80)}({arguments})"


def _fields(value: Any, depth: int = MAX_DEPTH) -> Any:
    """The form of an answer: its fields with the kinds of their values."""
    if isinstance(value, dict):
        items = list(value.items())[:MAX_FIELDS]
        return {clipped(str(key), 80): _fields(item, depth - 1) for key, item in items} if depth else "object"
    if isinstance(value, list):
        shape: Any = None
        for item in value if depth else ():
            item_shape = _fields(item, depth - 1)
            shape = item_shape if shape is None else _merged(shape, item_shape)
        return [] if shape is None else [shape]
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "number"
    return "null" if value is None else "text"


def _merged(first: Any, other: Any) -> Any:
    """Both forms in one: all fields of both; "text or null" where a value has several kinds."""
    if isinstance(first, dict) and isinstance(other, dict):
        common = {key: _merged(first[key], other[key]) for key in first if key in other}
        return dict(list({**first, **other, **common}.items())[:MAX_FIELDS])
    if isinstance(first, list) and isinstance(other, list):
        return [_merged(first[0], other[0])] if first and other else first or other
    if isinstance(first, str) and isinstance(other, str):
        return first if other in first.split(" or ") or first == other else f"{first} or {other}"
    return first if isinstance(first, dict | list) else other


def clipped(text: str, limit: int) -> str:
    """At most ``limit`` characters of a text, and how many were left out."""
    return text if len(text) <= limit else f"{text[:limit]}… (+{len(text) - limit} characters)"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class Rules:
    """What a file is checked for, in words: check -> what it means. What it may import, the contract's text says."""

    checks: Mapping[str, str]
    largest: int  # bytes of a file


@dataclass(frozen=True)
class RefusedFile:
    """A file that was refused, and the report on it as text."""

    source: str
    report: str


def request_messages(
    capability: Capability, trajectories: Sequence[Trajectory], labels: Sequence[Label], rules: Rules
) -> tuple[ChatMessage, ...]:
    """The dialogue that asks for a first file."""
    fields = {
        "name": capability.name,
        "title": capability.title,
        "description": capability.description,
        "when it is needed": capability.when_needed,
        "what exercising it looks like": capability.exercised,
        "what lacking it looks like": capability.lacking,
    }
    texts = "\n".join(f"{field}: {clipped(text, MAX_TEXT)}" for field, text in fields.items() if text.strip())
    policies = [_delimited("policy", text) for text in frequent_policies(trajectories)]
    failed = [_delimited("failure", text) for text in failure_texts(trajectories, labels, capability.name)]
    parts = [
        "# The capability",
        _delimited("capability", texts),
        "# The target: its policy, as its agents are told it (it may differ from task to task)",
        *(policies or ["None was recorded."]),
        "# The target: its tools",
        _delimited("tools", tool_text(trajectories)),
        "# The target: the state behind its tools, as their answers show it",
        _delimited("answers", state_text(trajectories)),
        "# What happened where the capability was lacking",
        *(failed or ["No conversation can be shown."]),
        "# The contract (sandbox/contract.py)",
        f"```python\n{inspect.getsource(contract).strip()}\n```",
        "# Rewards, scenarios, fidelity",
        _prompt_text("rewards"),
        "# What the file is checked for",
        _check_list(rules),
        "# An example: another capability of another target",
        f"```python\n{example().strip()}\n```",
        "# Your answer",
        _prompt_text("answer"),
    ]
    return (ChatMessage("system", f"{_prompt_text('system')}\n\n{IS_DATA}"), ChatMessage("user", "\n\n".join(parts)))


def repair_messages(
    request: Sequence[ChatMessage], base: RefusedFile, follow_up: RefusedFile | None, before: Sequence[str]
) -> tuple[ChatMessage, ...]:
    """The same dialogue with a file that was refused, and the report on it.

    ``since`` is what was answered after ``base`` and was no file at all; ``before`` says of each earlier attempt which
    checks refused it.
    """
    parts = [_prompt_text("mend"), _delimited("report", clipped(base.report, MAX_REPORT))]
    if follow_up is not None:
        parts += [
            "Asked to mend it, you answered without a file that defines Environment:",
            _delimited("answer", clipped(follow_up.source, MAX_TEXT)),
            _delimited("report", clipped(follow_up.report, MAX_REPORT)),
        ]
    if before:
        attempts = "\n".join(f"{number}. refused by {checks}" for number, checks in enumerate(before, 1))
        parts.append(f"Attempts before this one, the oldest first; do not go back to what they did:\n{attempts}")
    parts.append(_prompt_text("answer"))
    source = clipped(base.source.strip(), MAX_SOURCE)
    file = f"```python\n{source}\n```" if holds_environment(source) else source
    return (*request, ChatMessage("assistant", file), ChatMessage("user", "\n\n".join(parts)))


def example() -> str:
    """The worked example's source; it is read, not imported."""
    return files("agents.synthesizer.llm").joinpath("example.py").read_text("utf-8")


def _delimited(name: str, text: str) -> str:
    """Others' words, as any request can hold them."""
    return marked(name, replace_surrogates(text))


def _check_list(rules: Rules) -> str:
    lines = "\n".join(f"- {name}: {meaning}" for name, meaning in rules.checks.items())
    return f"{lines}\n\nThe file has at most {rules.largest // 1024} KiB; records are drawn from the seed, not listed."


def _prompt_text(name: str) -> str:
    return files("agents.synthesizer.llm").joinpath(f"prompts/{name}.md").read_text("utf-8").strip()
