"""The cases of adapter versions and the decisions on them, asked over a real socket of a seeded store."""

from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from benchmarks.seeded import Seeded
from store.database import open_store, sqlite_url, write_session
from store.records import CycleState
from store.repositories.cycles import set_cycle_state
from store.repositories.trajectories import list_trajectories, save_trajectories
from store.types import Outcome
from tests.integration.conftest import SEEDED_AT
from tests.integration.service.conftest import WrittenDown
from tests.integration.service.served import OPERATOR, READER, on_tcp, refused, served
from tests.unit.store.chain import trajectory
from traced.api.control import Control
from traced.config.settings import load_settings

AT = SEEDED_AT


@pytest.fixture
def store(seeded_store: Engine) -> Engine:
    return seeded_store


@pytest.fixture
def control(tmp_path: Path, store: Engine, loop: WrittenDown) -> Control:
    times = iter(AT + timedelta(minutes=minute) for minute in range(1000))
    return Control(load_settings(tmp_path), store, loop, lambda: next(times), AT, state="ready")  # type: ignore[arg-type]


async def test_those_that_wait_come_first_and_the_list_is_bounded(control: Control, path: Path, seeded: Seeded) -> None:
    async with served(control, path) as client:
        every = await client.approvals.list()
        assert [(one.name, one.standing) for one in every] == [
            (seeded.waiting, "waiting"),
            (seeded.rejected, "rejected"),
            (seeded.canary, "approved"),
            (seeded.live, "approved"),
        ]
        assert every[1].decision is not None
        assert (every[1].decision.who, every[1].decision.reason) == ("ada", "too little for what it costs")
        assert [one.name for one in await client.approvals.list(limit=1)] == [seeded.waiting]


async def test_the_case_has_the_gate_the_pairs_and_the_lineage(control: Control, path: Path, seeded: Seeded) -> None:
    async with served(control, path) as client:
        case = await client.approvals.case(seeded.waiting)
        [gate] = case.gates
        assert [(one.name, one.required) for one in gate.comparisons] == [
            ("environment", 0.05),
            ("target", 0.0),
            ("untouched", -0.03),
        ]
        assert (gate.rounds, case.looks, case.asked, case.policy) == (2, 3, None, "immediate")
        assert (case.capability.title, case.capability.runs) == ("Policy checks", 5)
        assert (case.environment.admitted, case.environment.checks, case.environment.failed) == (True, 12, [])
        assert case.environment.hash == seeded.environments["policy-checks"]
        assert case.training.iterations == 16
        assert case.training.first_reward is not None
        assert case.training.last_reward is not None
        assert case.training.first_reward < case.training.last_reward
        assert (case.cycle_id, case.cycle_state, case.decisions) == ("c-0003", "waiting", [])
        assert {one.on: one.pairs for one in case.changes} == {"environment": 40, "target": 60}
        live = await client.approvals.case(seeded.live)
        assert (live.live, live.decisions[0].who, [one.on for one in live.changes]) == (True, "ada", ["target"])
        assert (await client.approvals.case(seeded.canary)).trial == "canary"
        assert (await refused(client.approvals.case("nothing@v1"))).status == 404


async def test_pairs_are_of_one_task_and_a_failure_of_the_machinery_counts_for_nothing(
    control: Control, path: Path, seeded: Seeded
) -> None:
    name = seeded.waiting
    with write_session(control.store) as opened:
        of = {"split": "gate", "cycle_id": "c-0003"}
        broken = {"task_id": "b", "model": name, "reward": 0.0}
        save_trajectories(
            opened,
            [
                trajectory("a-base", Outcome.SUCCESS, task_id="a", **of),
                trajectory("a-new", Outcome.FAILURE, task_id="a", model=name, reward=0.0, **of),
                trajectory("b-base", Outcome.SUCCESS, task_id="b", **of),
                trajectory("b-new", Outcome.INFRASTRUCTURE, **broken, **of),
                trajectory("c-new", Outcome.SUCCESS, task_id="c", model=name, **of),
            ],
        )
        stored = {one.id: one for one in list_trajectories(opened)}

    async def ask() -> None:
        async with served(control, path) as client:
            case = await client.approvals.case(name)
            [on_target] = [one for one in case.changes if one.on == "target"]
            assert (on_target.pairs, on_target.infrastructure) == (61, 1)
            assert "a" in on_target.lost_tasks
            for one in (*case.harmed, *case.improved):
                base, new = stored[one.base.id], stored[one.adapter.id]
                assert (base.source, base.split, base.task_id, base.trial) == (
                    new.source,
                    new.split,
                    new.task_id,
                    new.trial,
                )
                assert (base.model, new.model) == ("base", name)
                assert one.change == new.reward - base.reward
            assert [one.change for one in case.harmed] == sorted(one.change for one in case.harmed)
            assert {one.task_id for one in case.harmed[:2]} >= {"a"}
            assert not {"b", "c"} & {one.task_id for one in (*case.harmed, *case.improved)}
            assert len(case.improved) == 8
            read = await client.approvals.episode(name, "a-new")
            assert (read.model, read.outcome, read.messages[1]["content"]) == (name, "failure", "I am a-new")
            assert read.messages[0]["content"] == "Be exact. \u2028 \ufffd \x00"
            foreign = next(one.id for one in stored.values() if one.cycle_id != "c-0003")
            for unknown in (foreign, "nothing", "no/such"):
                assert (await refused(client.approvals.episode(name, unknown))).status == 404

    await ask()


async def test_the_second_of_two_people_is_told_who_was_first(control: Control, path: Path, seeded: Seeded) -> None:
    async with on_tcp(control, OPERATOR) as far, served(control, path) as near:
        case = await far.approvals.case(seeded.waiting)
        mine = await near.approvals.case(seeded.waiting)
        await near.approvals.reject(mine, "harms refunds")
        for second in (far.approvals.approve(case, "reads well", "immediate"), far.approvals.reject(case, "no")):
            error = await refused(second)
            assert error.status == 409
            assert error.message.startswith("already decided: ")
            assert error.message.endswith(": harms refunds")
            assert f"rejected {seeded.waiting} on 2026-03-14 at 09:" in error.message
        assert [one.action for one in await far.audit()] == ["reject"]
        assert (await far.approvals.case(seeded.waiting)).decisions[0].reason == "harms refunds"


async def test_more_episodes_are_asked_for_by_operators_and_once(
    control: Control, path: Path, seeded: Seeded, loop: WrittenDown
) -> None:
    async with on_tcp(control, READER) as reader:
        case = await reader.approvals.case(seeded.waiting)
        assert (await refused(reader.approvals.more_episodes(case, "please"))).status == 403
        assert (await refused(reader.approvals.reject(case, "please"))).status == 403
    async with served(control, path) as client:
        done = await client.approvals.more_episodes(case, "too few")
        assert done.detail["asked"]["look"] == 3
        assert "before" in (await client.approvals.more_episodes(case, "me too")).said
        asked = (await client.approvals.case(seeded.waiting)).asked
        assert asked is not None
        assert (asked.look, asked.reason) == (3, "too few")
        error = await refused(client.approvals.approve(case, "", "immediate"))
        assert "cannot be approved yet" in error.message
        [entry] = await client.audit()
        assert (entry.action, entry.subject, entry.detail["look"]) == ("more-episodes", seeded.waiting, 3)
        [told] = await client.last_events(kind="more-episodes")
        assert (told.subject, told.cycle_id, told.detail["reason"]) == (seeded.waiting, "c-0003", "too few")
        await client.approvals.reject(case, "after all")
        assert (await client.approvals.case(seeded.waiting)).asked is None
    assert loop.asked == ["wake"] * 3


async def test_no_more_episodes_where_nothing_would_play_them(control: Control, path: Path, seeded: Seeded) -> None:
    with write_session(control.store) as opened:
        set_cycle_state(opened, "c-0003", CycleState.CANCELLED, at=AT)
    async with served(control, path) as client:
        case = await client.approvals.case(seeded.waiting)
        assert "is cancelled" in (await refused(client.approvals.more_episodes(case, ""))).message


async def test_an_empty_store_has_none(tmp_path: Path, path: Path, loop: WrittenDown) -> None:
    made = open_store(sqlite_url(tmp_path / "empty.db"))
    control = Control(load_settings(tmp_path), made, loop, lambda: AT, AT, state="ready")  # type: ignore[arg-type]
    async with served(control, path) as client:
        assert await client.approvals.list() == []
    made.dispose()


async def test_a_case_reads_no_messages(control: Control, path: Path, seeded: Seeded) -> None:
    asked: list[str] = []

    event.listen(control.store, "before_cursor_execute", lambda *given: asked.append(given[2]))
    async with served(control, path) as client:
        await client.approvals.list()
        await client.approvals.case(seeded.waiting)
    assert any("FROM trajectories" in one for one in asked)
    assert not [one for one in asked if "messages" in one]
