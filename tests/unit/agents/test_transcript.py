"""What a tool or a model said is read, whatever it is."""

from typing import Any

from agents.transcript import observation, transcript
from store.types import EndCause, Outcome, Trajectory


def test_text_that_is_nested_too_deep_is_text() -> None:
    deep = "[" * 100_000
    assert observation(0, deep).value == deep
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": deep}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": deep},
    ]
    instance = Trajectory("t", "desk", "", "1", 0, "base", 0, messages, [], [], 0, Outcome.UNKNOWN, EndCause.SILENCE)
    assert transcript(instance)
