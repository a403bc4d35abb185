"""Conversations of the target acme, which nobody can play."""

from typing import Any

from store.types import EndCause, Outcome, Trajectory
from traced.targets.conversation_target import TRAIN


def conversation(number: int, outcome: Outcome, **changes: Any) -> Trajectory:
    """Return a judged conversation of the train split; ``changes`` are fields of it."""
    values: dict[str, Any] = {
        "id": f"acme-{number}",
        "source": "acme",
        "split": TRAIN,
        "task_id": str(number),
        "trial": 0,
        "model": "agent",
        "temperature": 0.0,
        "messages": [{"role": "user", "content": f"order {number}"}, {"role": "assistant", "content": "done"}],
        "tools": [],
        "turns": [],
        "reward": float(outcome is Outcome.SUCCESS),
        "outcome": outcome,
        "end_cause": EndCause.IMPORTED,
    }
    return Trajectory(**values | changes)
