"""Reads conversations as sequences of tool calls, each with its answer; nothing else of a conversation is used.

An answer is an error if it says so (``agents.transcript``), or if it is bare text of a tool that mostly answers with
objects or lists.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agents.transcript import Transcript
from agents.world.values import canonical_json

# From this share of objects and lists among its answers on, bare text of a tool is an error.
_MOSTLY_JSON = 0.5


@dataclass(frozen=True)
class AnsweredCall:
    """A call of a conversation about ``task``; ``value`` is its parsed answer, or the text if that is not JSON."""

    task: str
    tool: str
    arguments: dict[str, Any]
    text: str
    value: Any
    failed: bool

    @property
    def key(self) -> str:
        """The arguments as canonical JSON."""
        return canonical_json(self.arguments)


@dataclass(frozen=True)
class Conversation:
    """The answered calls of one conversation, in order."""

    id: str
    task: str
    calls: list[AnsweredCall]


def conversations(transcripts: Sequence[Transcript], tasks: Sequence[str]) -> list[Conversation]:
    """Return the calls of conversations; ``tasks`` names the task of each."""
    json_counts: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for transcript in transcripts:
        for call in transcript.calls:
            if call.succeeded and call.result is not None:
                counts[call.name] += 1
                json_counts[call.name] += isinstance(call.result.value, dict | list)
    json_tools = {tool for tool, count in counts.items() if json_counts[tool] > _MOSTLY_JSON * count}
    return [
        Conversation(transcript.trajectory_id, task, list(_calls(transcript, task, json_tools)))
        for transcript, task in zip(transcripts, tasks, strict=True)
    ]


def _calls(transcript: Transcript, task: str, json_tools: set[str]) -> Iterable[AnsweredCall]:
    for call in transcript.calls:
        if call.arguments is None or call.result is None:
            continue
        result = call.result
        failed = result.error or (call.name in json_tools and isinstance(result.value, str))
        yield AnsweredCall(task, call.name, call.arguments, result.text, result.value, failed)
