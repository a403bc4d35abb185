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


def policy_texts(trajectories: Iterable[Trajectory]) -> list[str]:
    """The system messages that were seen most, each once."""
    seen = Counter(one.system for one in transcripts(list(trajectories)) if one.system.strip())
    return [clipped(text, POLICY) for text, _ in seen.most_common(POLICIES)]


def tool_text(trajectories: Iterable[Trajectory]) -> str:
    """Every tool's schema, one a line, in the order in which they were first offered."""
    found: dict[str, Tool] = {}
    for trajectory in trajectories:
        for tool in trajectory.tools:
            found.setdefault(str(tool_function(tool).get("name", "")), tool)
    return "\n".join(_json(tool) for tool in found.values())


def state_text(trajectories: Iterable[Trajectory]) -> str:
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


def failure_texts(trajectories: Sequence[Trajectory], labels: Iterable[Label], capability: str) -> list[str]:
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


SOURCE = 60_000  # characters of a refused file that are sent back
REPORT = 12_000
TEXT = 1_000  # of a capability


@dataclass(frozen=True)
class Rules:
    """What a file is checked for, in words: check -> what it means. What it may import, the contract's text says."""

    checks: Mapping[str, str]
    largest: int  # bytes of a file


@dataclass(frozen=True)
class Refused:
    """A file that was refused, and the report on it as text."""

    source: str
    report: str


def asking(
    capability: Capability, trajectories: Sequence[Trajectory], labels: Sequence[Label], rules: Rules
) -> tuple[ChatMessage, ...]:
    """The dialogue that asks for a first file."""
    wanted = {
        "name": capability.name,
        "title": capability.title,
        "description": capability.description,
        "when it is needed": capability.when_needed,
        "what exercising it looks like": capability.exercised,
        "what lacking it looks like": capability.lacking,
    }
    texts = "\n".join(f"{what}: {clipped(text, TEXT)}" for what, text in wanted.items() if text.strip())
    policies = [_data("policy", text) for text in policy_texts(trajectories)]
    failed = [_data("failure", text) for text in failure_texts(trajectories, labels, capability.name)]
    parts = [
        "# The capability",
        _data("capability", texts),
        "# The target: its policy, as its agents are told it (it may differ from task to task)",
        *(policies or ["None was recorded."]),
        "# The target: its tools",
        _data("tools", tool_text(trajectories)),
        "# The target: the state behind its tools, as their answers show it",
        _data("answers", state_text(trajectories)),
        "# What happened where the capability was lacking",
        *(failed or ["No conversation can be shown."]),
        "# The contract (sandbox/contract.py)",
        f"```python\n{inspect.getsource(contract).strip()}\n```",
        "# Rewards, scenarios, fidelity",
        _text("rewards"),
        "# What the file is checked for",
        _checks(rules),
        "# An example: another capability of another target",
        f"```python\n{example().strip()}\n```",
        "# Your answer",
        _text("answer"),
    ]
    return (ChatMessage("system", f"{_text('system')}\n\n{IS_DATA}"), ChatMessage("user", "\n\n".join(parts)))


def mending(
    asked: Sequence[ChatMessage], base: Refused, since: Refused | None, before: Sequence[str]
) -> tuple[ChatMessage, ...]:
    """The same dialogue with a file that was refused, and the report on it.

    ``since`` is what was answered after ``base`` and was no file at all; ``before`` says of each earlier attempt which
    checks refused it.
    """
    parts = [_text("mend"), _data("report", clipped(base.report, REPORT))]
    if since is not None:
        parts += [
            "Asked to mend it, you answered without a file that defines Environment:",
            _data("answer", clipped(since.source, TEXT)),
            _data("report", clipped(since.report, REPORT)),
        ]
    if before:
        listed = "\n".join(f"{number}. refused by {checks}" for number, checks in enumerate(before, 1))
        parts.append(f"Attempts before this one, the oldest first; do not go back to what they did:\n{listed}")
    parts.append(_text("answer"))
    said = clipped(base.source.strip(), SOURCE)
    file = f"```python\n{said}\n```" if holds_environment(said) else said
    return (*asked, ChatMessage("assistant", file), ChatMessage("user", "\n\n".join(parts)))


def example() -> str:
    """The worked example's source; it is read, not imported."""
    return files("agents.synthesizer.llm").joinpath("example.py").read_text("utf-8")


def _data(name: str, text: str) -> str:
    """Others' words, as any request can hold them."""
    return marked(name, replace_surrogates(text))


def _checks(rules: Rules) -> str:
    listed = "\n".join(f"- {name}: {meaning}" for name, meaning in rules.checks.items())
    return f"{listed}\n\nThe file has at most {rules.largest // 1024} KiB; records are drawn from the seed, not listed."


def _text(name: str) -> str:
    return files("agents.synthesizer.llm").joinpath(f"prompts/{name}.md").read_text("utf-8").strip()
