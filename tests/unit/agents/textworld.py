"""Conversations of ``textworld:quest`` with planted faults, as ``scripts.pretraining.textworld_demonstrations`` wrote
them: the first 200 seeds from 3,000,000.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from store.types import EndCause, Outcome, Trajectory

FILE = Path(__file__).parents[2] / "data" / "textworld_conversations.jsonl"


@dataclass(frozen=True)
class Quest:
    """A conversation, and the capabilities that its task needs and that the agent lacked in it."""

    trajectory: Trajectory
    needs: list[str]
    faulty: list[str]


def quests() -> list[Quest]:
    """Return the conversations."""
    with FILE.open(encoding="utf-8") as lines:
        head, *rows = [json.loads(line) for line in lines]
    return [
        Quest(
            Trajectory(
                id=str(row["seed"]),
                source="textworld:quest",
                split="train",
                task_id=str(row["seed"]),
                trial=0,
                model="base",
                temperature=1.0,
                messages=[{"role": "system", "content": head["system"]}, *row["messages"]],
                tools=head["tools"],
                turns=[],
                reward=float(row["success"]),
                outcome=Outcome.SUCCESS if row["success"] else Outcome.FAILURE,
                end_cause=EndCause.DONE,
            ),
            row["needs"],
            row["faulty"],
        )
        for row in rows
    ]
