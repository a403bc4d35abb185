"""What a check answers: whether it passed, and the figures, faults and episodes that say why.

Invariants: evidence is plain JSON and small. "examples" holds at most ``EXAMPLES`` episodes an author needs to see,
each {"seed", "what", "transcript"}; a transcript is the chat as the agent saw it, its long texts and its middle cut.
"""

import json
from typing import Any

from sandbox.contract import Message, Task
from sandbox.errors import EnvironmentFault, clipped

Verdict = tuple[bool, dict[str, Any]]

EXAMPLES = 3
SHOWN_MESSAGES = 24
SHOWN_CHARACTERS = 600  # of one text


def example(seed: int, what: str, task: Task, messages: list[Message]) -> dict[str, Any]:
    """One episode as evidence; ``what`` is a sentence."""
    chat = [{"role": "system", "content": task.system}, *task.messages, *messages]
    if len(chat) > SHOWN_MESSAGES:
        half = SHOWN_MESSAGES // 2
        cut = {"role": "system", "content": f"... {len(chat) - 2 * half} messages cut ..."}
        chat = [*chat[:half], cut, *chat[-half:]]
    return {"seed": seed, "what": clipped(what, SHOWN_CHARACTERS), "transcript": [_shown(message) for message in chat]}


def _shown(message: Message) -> Message:
    shown: Message = {"role": str(message.get("role"))}
    content = message.get("content")
    shown["content"] = None if content is None else clipped(str(content), SHOWN_CHARACTERS)
    if "tool_call_id" in message:
        shown["tool_call_id"] = clipped(str(message["tool_call_id"]), 80)
    if message.get("tool_calls"):
        shown["tool_calls"] = [_shown_call(call) for call in message["tool_calls"][:8]]
    return shown


def _shown_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = clipped(str(function["arguments"]), SHOWN_CHARACTERS)
    named = {"name": clipped(str(function["name"]), 80), "arguments": arguments}
    return {"id": clipped(str(call["id"]), 80), "type": "function", "function": named}


def plain(value: Any) -> str:
    """A value as JSON, for a sentence."""
    return clipped(json.dumps(value, ensure_ascii=False), 120)


def fault_evidence(error: Exception) -> dict[str, Any]:
    """What a failed check says of the error that ended it."""
    notes = "; ".join(getattr(error, "__notes__", []))
    evidence = {"fault": type(error).__name__, "text": clipped(str(error), 1000), "at": notes}
    if isinstance(error, EnvironmentFault) and error.traceback:
        evidence["traceback"] = error.traceback
    return evidence
