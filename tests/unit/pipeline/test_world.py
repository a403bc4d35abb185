"""The world of a recorded target: what it is made of, and where it is stored."""

import asyncio
from pathlib import Path

import pytest

from agents.world.reconstruction import read_data
from store.repositories.environments import get_source
from store.repositories.trajectories import save_trajectories
from store.types import EndCause, Outcome, Trajectory
from tests.unit.agents.world.targets import Library, loan, trajectory
from tests.unit.pipeline.contexts import context_with_chain
from traced.core.errors import StageError
from traced.pipeline.context import Context
from traced.pipeline.world import find_figures, find_world, make_world
from traced.targets.conversation_target import HELD_OUT, TRAIN

ACME = {"target.name": "acme", "target.kind": "recorded"}


def save(context: Context, number: int, book: str, split: str) -> Trajectory:
    row = trajectory(Library, number, loan(book, "m1"), source="acme", split=split)
    with context.write_session() as session:
        save_trajectories(session, [row])
    return row


def test_a_world_is_made_once_and_of_no_held_out_conversation(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, ACME) as context:
        assert find_world(context) is None
        rows = [save(context, n, f"b{n}", TRAIN) for n in range(3)]
        save(context, 7, "b7", HELD_OUT)
        (world,) = {_world(context) for _ in range(2)}
        digest, source_code, conversations = world
        assert conversations == tuple(sorted(row.id for row in rows))
        assert "b2" in source_code
        assert "b7" not in source_code
        assert list(read_data(source_code)["writes"]) == ["lend"]
        with context.read_session() as session:
            assert get_source(session, digest) == source_code
        # Conversations that come later are the next cycle's.
        save(context, 4, "b4", TRAIN)
        assert _world(context) == world
        assert find_figures(context) is None


def _world(context: Context) -> tuple[str, str, tuple[str, ...]]:
    world = asyncio.run(make_world(context))
    return world.digest, world.source_code, tuple(world.conversations)


def test_a_world_that_the_sandbox_could_not_load_is_made_of_fewer_conversations(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, ACME | {"sandbox.message_kb": 64}) as context:
        for number in range(40):
            save(context, number, f"b{number % 9}", TRAIN)
        _, source_code, conversations = _world(context)
        assert len(source_code) <= 0.75 * 64 * 1024
        assert 0 < len(conversations) <= 40


async def test_without_tool_calls_there_is_no_world(tmp_path: Path) -> None:
    talk = Trajectory(
        *("t", "acme", TRAIN, "1", 0, "agent", 0.0, [{"role": "user", "content": "hi"}], [], [], 1.0),
        outcome=Outcome.SUCCESS,
        end_cause=EndCause.IMPORTED,
    )
    with context_with_chain(tmp_path, ACME) as context:
        with context.write_session() as session:
            save_trajectories(session, [talk])
        with pytest.raises(StageError, match="answered tool call"):
            await make_world(context)
