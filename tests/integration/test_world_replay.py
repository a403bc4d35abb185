"""A world of imported conversations answers calls of held-out ones in the sandbox; one that lies is found out."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from store.records import Cycle, CycleState
from store.repositories.cycles import save_cycle
from store.repositories.environments import save_source
from tests.unit.agents.world.targets import Library, loan, trajectory
from tests.unit.targets.conversations import NOW, new_cycle
from traced.evaluation.intervals import Share
from traced.evaluation.world_agreement import HELD_OUT_CALLS, LEFT_OUT_CALLS, ToolAgreement, WorldFigures
from traced.ingest.file_import import ImportRequest, import_file
from traced.pipeline.admit import admission_world, usable_world
from traced.pipeline.context import Context
from traced.pipeline.report import gather
from traced.pipeline.world import WORLD, find_world, make_world, prove_world

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]
SHARE = {"target.held_out": 0.4}
TASKS = 14


def records() -> list[dict[str, Any]]:
    """Return conversations of a lending library as τ-bench writes them: each lends a book, twice."""
    rows = []
    for task in range(TASKS):
        for trial in range(2):
            book, member = f"b{task % 4}", f"m{task % 3}"
            calls = [*loan(book, member), ("lend", {"book": book, "member": "m0"})]
            messages = trajectory(Library, task, calls).messages
            system = {"role": "system", "content": "You serve a library."}
            rows.append({"task_id": task, "trial": trial, "reward": 1.0, "info": {}, "traj": [system, *messages]})
    return rows


async def imported(context: Context, folder: Path) -> None:
    file = folder / "recorded.json"
    file.write_text(json.dumps(records()))
    import_file(context.store, context.settings, ImportRequest(file), at=datetime(2026, 1, 1, tzinfo=UTC))


def rows_of(figures: WorldFigures, split: str) -> dict[str, ToolAgreement]:
    return {row.tool: row for row in figures.agreement[split]}


async def test_held_out_calls_are_answered_as_the_target_did(tmp_path: Path) -> None:
    with new_cycle(tmp_path, **SHARE) as context:
        await imported(context, tmp_path)
        figures = await prove_world(context)
        held_out, left_out = rows_of(figures, HELD_OUT_CALLS), rows_of(figures, LEFT_OUT_CALLS)
        assert set(held_out) == {"get_book", "get_member", "lend", "all reads", "all writes"}
        for tools in (held_out, left_out):
            assert tools["all reads"].exact.count >= 8
            assert tools["all reads"].exact.share >= 0.9
            assert tools["all writes"].error_class.share >= 0.8
            assert tools["lend"].errors.share == 1.0
            # A left-out task may have a state that no other one has.
            assert tools["all reads"].states.share >= (0.9 if tools is held_out else 0.8)
        # Measured once, and shown in the report and at admission.
        assert await prove_world(context) == figures
        assert gather(context).world == figures
        assert admission_world(figures).digest == figures.digest
        assert await usable_world(context) is not None


async def test_a_world_that_answers_otherwise_disagrees(tmp_path: Path) -> None:
    with new_cycle(tmp_path, **SHARE) as context:
        await imported(context, tmp_path)
        world = await make_world(context)
        # In another cycle: a cycle keeps its first world.
        with context.write_session() as session:
            save_cycle(session, Cycle("c3", "acme", "tiny", 0, {}, CycleState.RUNNING, NOW))
        context = replace(context, cycle_id="c3")
        lie = world.source_code.replace('status\\": \\"in\\"', 'status\\": \\"lost\\"')
        assert lie != world.source_code
        with context.write_session() as session:
            digest = save_source(session, lie)
        with context.stage(WORLD, "Another world") as stage:
            stage.detail = {"digest": digest, "conversations": world.conversations, "left_out": 0}
        assert find_world(context) != world
        books = rows_of(await prove_world(context), HELD_OUT_CALLS)["get_book"]
        assert books.exact.share <= 0.5
        assert 0.3 < books.fields.share < 1.0
        assert books.exact != Share(0, 0.0, 0.0, 1.0)
        # No further environment answers by it what it answers wrongly.
        usable = await usable_world(context)
        assert usable is not None
        assert "get_book" in usable.omitted
        assert "get_member" not in usable.omitted
