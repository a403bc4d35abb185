"""Conversations of a shop's agent, as trajectories."""

import json
from typing import Any

from store.types import EndCause, Outcome, Trajectory


def call(name: str, arguments: dict[str, Any], result: Any = None, call_id: str = "c1") -> list[dict[str, Any]]:
    """The messages of a call and, where there is one, of its result."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
    text = result if isinstance(result, str) else json.dumps(result)
    return [message] + ([{"role": "tool", "tool_call_id": call_id, "content": text}] if result is not None else [])


def text_message(role: str, text: str) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": text}


def conversation(
    *messages: dict[str, Any], trajectory_id: str = "t1", outcome: Outcome = Outcome.UNKNOWN, source: str = "shop"
) -> Trajectory:
    """A trajectory of these messages; parts and detail are what nobody may see."""
    return Trajectory(
        id=trajectory_id,
        source=source,
        split="",
        task_id=f"task-{trajectory_id}",
        trial=0,
        model="base",
        temperature=0.0,
        messages=[text_message("system", "Be brief."), *messages],
        tools=[],
        turns=[],
        reward=float(outcome is Outcome.SUCCESS),
        outcome=outcome,
        end_cause=EndCause.SILENCE,
        parts={"hidden": 0.123},
        detail="hidden detail",
    )


CANCELLED = conversation(
    text_message("user", "Cancel order 7, please."),
    *call("get_order", {"id": 7}, {"id": 7, "status": "open", "items": [{"sku": "a", "n": 1}, {"sku": "b", "n": 2}]}),
    *call("cancel_order", {"id": 7}, "Error: try again", "c2"),
    *call("cancel_order", {"id": 7}, {"status": "cancelled"}, "c3"),
    text_message("assistant", "Order 7 is cancelled."),
    text_message("user", "Thanks!"),
)
