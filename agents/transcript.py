"""Reads a recorded trajectory as a conversation: texts, tool calls and tool results.

Only ``Trajectory.messages`` and ``Trajectory.tools`` are read, never ``parts``, ``task_id`` or a reward. Analysis and
synthesis therefore use nothing that a production agent could not see. Content parts other than text are skipped.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agents.errors import TranscriptError
from store.types import Message, Tool, Trajectory

_ERROR_TEXT = re.compile(r"^\W*(error|exception|traceback|failed|invalid)\b", re.IGNORECASE)
STOP_MARK = re.compile(r"#{3}\w+#{3}")


@dataclass(frozen=True)
class Observation:
    """A tool's answer in message ``index``; ``value`` is the parsed JSON, or the text if it is not JSON."""

    index: int
    text: str
    value: object
    error: bool


@dataclass(frozen=True)
class Call:
    """A tool call as the agent wrote it, and its result.

    ``result`` is None if the episode ended before the tool answered; ``arguments`` is None if ``raw`` is not a JSON
    object.
    """

    index: int
    name: str
    arguments: dict[str, object] | None
    raw: str
    result: Observation | None

    @property
    def succeeded(self) -> bool:
        """Whether the call has a result that is not an error."""
        return self.result is not None and not self.result.error


@dataclass(frozen=True)
class Utterance:
    """A text message of the user or the agent."""

    index: int
    text: str


@dataclass(frozen=True)
class Transcript:
    """One conversation; calls and texts are in message order, indices are those of ``Trajectory.messages``."""

    trajectory_id: str
    system: str
    user: list[Utterance]
    agent: list[Utterance]
    calls: list[Call]
    tools: list[Tool]
    length: int

    def user_before(self, index: int) -> list[Utterance]:
        """Return the user's texts before message ``index``."""
        return [utterance for utterance in self.user if utterance.index < index]

    def observations_before(self, index: int) -> list[Observation]:
        """Return the tool answers before message ``index``."""
        return [call.result for call in self.calls if call.result is not None and call.result.index < index]


def transcript(trajectory: Trajectory) -> Transcript:
    """Return the conversation of a trajectory.

    Raises:
        TranscriptError: a message has no role, or its tool calls are malformed.
    """
    system: list[str] = []
    utterances: dict[str, list[Utterance]] = {"user": [], "assistant": []}
    open_calls: list[tuple[int, str, str, str]] = []
    answers: dict[int, Observation] = {}
    for index, message in enumerate(trajectory.messages):
        role, text = _role(trajectory.id, index, message), message_text(message)
        if role in ("system", "developer"):
            system.append(text)
        elif role == "tool":
            position = _answered_call(open_calls, answers, message.get("tool_call_id"))
            if position is not None:
                answers[position] = observation(index, text)
        elif role in utterances:
            # User simulators end a conversation with marks such as ###STOP###, which are not part of the text.
            text = STOP_MARK.sub("", text).strip()
            if text:
                utterances[role].append(Utterance(index, text))
            open_calls += [(index, *_function(call)) for call in _calls(trajectory.id, index, message)]
    calls = [
        Call(index, name, _arguments(raw), raw, answers.get(position))
        for position, (index, _, name, raw) in enumerate(open_calls)
    ]
    return Transcript(
        trajectory_id=trajectory.id,
        system="\n".join(system),
        user=utterances["user"],
        agent=utterances["assistant"],
        calls=calls,
        tools=trajectory.tools,
        length=len(trajectory.messages),
    )


def transcripts(trajectories: Sequence[Trajectory]) -> list[Transcript]:
    """Return the conversations of several trajectories, in order; raises as ``transcript``."""
    return [transcript(trajectory) for trajectory in trajectories]


def observation(index: int, text: str) -> Observation:
    """Return a tool's answer in message ``index``, parsed, with the decision whether it reports an error."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    return Observation(index, text, value, _is_error(value))


def tool_function(tool: Tool) -> dict[str, Any]:
    """Return the function schema of a tool given with or without its ``{"type": "function", ...}`` wrapper."""
    function = tool.get("function", tool)
    return function if isinstance(function, dict) else {}


def _is_error(value: object) -> bool:
    if isinstance(value, dict):
        if value.get("error") or value.get("errors"):
            return True
        return any(value.get(key) is False for key in ("ok", "success")) or value.get("status") == "error"
    return isinstance(value, str) and bool(_ERROR_TEXT.match(value))


def _role(trajectory_id: str, index: int, message: Message) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise TranscriptError(
            f"trajectory {trajectory_id}: message {index} has no role, only {sorted(message)}; "
            "import the file again, or leave this trajectory out"
        )
    return role


def _calls(trajectory_id: str, index: int, message: Message) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    if isinstance(calls, list) and all(_is_call(call) for call in calls):
        return calls
    raise TranscriptError(
        f"trajectory {trajectory_id}: message {index} has tool calls that are none, {str(calls)[:80]!r}; "
        "import the file again, or leave this trajectory out"
    )


def _is_call(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("function") or {}, dict)


def message_text(message: Message) -> str:
    """Return the text of a message, empty if it has none; content parts are joined by newlines."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return ""


def _function(call: dict[str, Any]) -> tuple[str, str, str]:
    function = call.get("function") or {}
    raw = function.get("arguments", "")
    return str(call.get("id", "")), str(function.get("name", "")), raw if isinstance(raw, str) else json.dumps(raw)


def _arguments(raw: str) -> dict[str, object] | None:
    try:
        value = json.loads(raw or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _answered_call(
    calls: list[tuple[int, str, str, str]], answers: dict[int, Observation], call_id: object
) -> int | None:
    # A result without a matching id belongs to the oldest open call: some recorders drop the ids.
    unanswered = [position for position in range(len(calls)) if position not in answers]
    matching = [position for position in unanswered if call_id and calls[position][1] == call_id]
    return next(iter(matching or unanswered), None)
