"""The world of a recorded target: what it is made of, and where it is stored."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from agents.world.agreement import CallAgreement
from agents.world.reconstruction import read_data
from agents.world.runtime import NOT_RECORDED, World
from sandbox.errors import SandboxError
from store.repositories.environments import get_source
from store.repositories.trajectories import save_trajectories
from store.types import EndCause, Outcome, Trajectory
from tests.unit.agents.world.targets import Library, loan, trajectory
from tests.unit.pipeline.contexts import context_with_chain
from traced.core.errors import StageError
from traced.evaluation.world_agreement import HELD_OUT_CALLS, REPLAY, agreement_json, tool_agreements
from traced.evaluation.world_bounds import refuted_tools
from traced.pipeline.admit import usable_world
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


class Till:
    """A payment, and a balance that depends on what no call shows."""

    def __init__(self, balance: int) -> None:
        self.balance = balance

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Return a tool's answer."""
        if tool == "prices":
            return json.dumps({"till": arguments["till"], "price": 3})
        return json.dumps({"ok": True} if tool == "pay" else {"balance": self.balance})


def save_payment(context: Context, number: int, balance: int, split: str = TRAIN) -> None:
    calls = [("prices", {"till": "t1"}), ("pay", {"till": "t1"}), ("balance", {"till": "t1"})]
    row = trajectory(lambda: Till(balance), number, calls, source="acme", split=split)
    with context.write_session() as session:
        save_trajectories(session, [row])


def test_a_tool_that_answers_other_tasks_wrongly_is_omitted_with_its_evidence(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, ACME) as context:
        for number in range(7):
            save_payment(context, number, balance=9 if number < 2 else 5)
        # What is held out does not decide.
        save_payment(context, 8, balance=5, split=HELD_OUT)
        world = asyncio.run(make_world(context))
        assert [item.tool for item in world.omitted] == ["balance"]
        assert 0 < world.omitted[0].exact.count <= 7
        assert world.omitted[0].exact.share < 0.9
        data = read_data(world.source_code)
        state = World(data)
        assert json.loads(state.call("prices", {"till": "t1"}))["price"] == 3
        assert state.call("pay", {"till": "t1"}) == json.dumps({"ok": True})
        assert state.call("balance", {"till": "t1"}) == NOT_RECORDED
        # Without the omission the majority of the tasks would have been answered.
        assert find_world(context) == world
        usable = asyncio.run(usable_world(context))
        assert usable is not None
        assert usable.omitted == ["balance"]


def test_an_omitted_tool_that_still_disagrees_does_not_repeat_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    omissions: list[list[str]] = []

    def omit_nothing(data: dict[str, Any], names: list[str]) -> dict[str, Any]:
        omissions.append(names)
        assert len(omissions) < 20
        return data

    with context_with_chain(tmp_path, ACME) as context:
        for number in range(7):
            save_payment(context, number, balance=9 if number < 2 else 5)
        monkeypatch.setattr("traced.pipeline.world.without_tools", omit_nothing)
        world = asyncio.run(make_world(context))
    assert [item.tool for item in world.omitted] == ["balance"]


def test_a_tool_that_held_out_calls_refute_is_not_used_and_its_answers_stay_in_the_figures(tmp_path: Path) -> None:
    wrong = [CallAgreement(str(n), "pay", True, True, False, 0.0, True, False, False) for n in range(20)]
    rows = tool_agreements([*wrong, CallAgreement("1", "prices", False, True, True, 1.0, True, False, False)])
    refuted = refuted_tools(rows)
    assert [item.tool for item in refuted] == ["pay"]
    with context_with_chain(tmp_path, ACME) as context:
        save_payment(context, 0, balance=5)
        digest = asyncio.run(make_world(context)).digest
        with context.stage(REPLAY, "Replay") as stage:
            stage.detail = {
                "digest": digest,
                "conversations": 1,
                "agreement": agreement_json({HELD_OUT_CALLS: rows}),
                "omitted": [asdict(item) for item in refuted],
            }
        figures = find_figures(context)
        assert figures is not None
        assert "20 of 20 answered, 0 %" in figures.text
        assert figures.text.endswith("omitted tools: pay")
        usable = asyncio.run(usable_world(context))
        assert usable is not None
        assert (usable.digest, usable.omitted) == (digest, ["pay"])
        state = World(usable.data)
        assert state.call("pay", {"till": "t1"}) == NOT_RECORDED
        # The payment may have been made.
        assert state.call("balance", {"till": "t1"}) == NOT_RECORDED


def test_without_docker_environments_stand_on_the_world_as_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def without_docker(context: Context) -> None:
        raise SandboxError("Docker cannot be used")

    monkeypatch.setattr("traced.pipeline.admit.prove_world", without_docker)
    with context_with_chain(tmp_path, ACME) as context:
        for number in range(3):
            save(context, number, f"b{number}", TRAIN)
        usable = asyncio.run(usable_world(context))
        assert usable is not None
        assert usable.digest == asyncio.run(make_world(context)).digest


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
