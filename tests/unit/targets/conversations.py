"""Conversations of the target acme, which nobody can play."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from store.records import Cycle, CycleState
from store.repositories.cycles import save_cycle
from store.types import EndCause, Outcome, Trajectory
from tests.unit.pipeline.contexts import context_with_chain
from traced.pipeline.context import Context
from traced.targets.conversation_target import TRAIN

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ACME = {"target.name": "acme", "target.kind": "recorded"}


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


@contextmanager
def new_cycle(folder: Path, **overrides: object) -> Iterator[Context]:
    """The context of a cycle that has analysed nothing."""
    with context_with_chain(folder, ACME | overrides) as context:
        with context.write_session() as session:
            save_cycle(session, Cycle("c2", "acme", "tiny", 0, {}, CycleState.RUNNING, NOW))
        yield replace(context, cycle_id="c2")


def judged_conversations(successes: int, failures: int) -> list[Trajectory]:
    outcomes = [Outcome.SUCCESS] * successes + [Outcome.FAILURE] * failures
    return [conversation(number, outcome) for number, outcome in enumerate(outcomes)]
