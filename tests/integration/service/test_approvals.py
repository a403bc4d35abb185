"""The cases of adapter versions and the decisions on them, asked over a real socket of a seeded store."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from benchmarks.seeded import Seeded
from store.database import open_store, sqlite_url, write_session
from store.records import CycleState, StageEvent, StageState
from store.repositories.cycles import save_stage_event, set_cycle_state
from store.repositories.trajectories import list_trajectories, save_trajectories
from store.types import Outcome
from tests.integration.conftest import SEEDED_AT
from tests.integration.service.api_server import OPERATOR, READER, expect_refusal, on_tcp, serve_api
from tests.integration.service.conftest import RecordingLoop
from tests.unit.store.chain import trajectory
from traced.api.control import Control
from traced.client.approvals import LengthsView
from traced.config.settings import load_settings
from traced.evaluation.examples import EXAMPLES

NOW = SEEDED_AT


@pytest.fixture
def store(seeded_store: Engine) -> Engine:
    return seeded_store


@pytest.fixture
def control(tmp_path: Path, store: Engine, loop: RecordingLoop) -> Control:
    times = iter(NOW + timedelta(minutes=minute) for minute in range(1000))
    return Control(load_settings(tmp_path), store, loop, lambda: next(times), NOW, state="ready")  # type: ignore[arg-type]


async def test_those_that_wait_come_first_and_the_list_is_bounded(control: Control, path: Path, seeded: Seeded) -> None:
    async with serve_api(control, path) as client:
        cases = await client.approvals.list()
        assert [(case.name, case.standing) for case in cases] == [
            (seeded.waiting, "waiting"),
            (seeded.rejected, "rejected"),
            (seeded.canary, "approved"),
            (seeded.live, "approved"),
        ]
        assert cases[1].decision is not None
        assert (cases[1].decision.who, cases[1].decision.reason) == ("ada", "too little for what it costs")
        assert [case.name for case in await client.approvals.list(limit=1)] == [seeded.waiting]
        await client.roll_back(seeded.live)
        assert {case.name: case.standing for case in await client.approvals.list()}[seeded.live] == "rolled back"


async def test_the_case_has_the_gate_the_pairs_and_the_lineage(control: Control, path: Path, seeded: Seeded) -> None:
    async with serve_api(control, path) as client:
        case = await client.approvals.case(seeded.waiting)
        [gate] = case.gates
        assert [(comparison.name, comparison.required) for comparison in gate.comparisons] == [
            ("environment", 0.05),
            ("target", 0.0),
            ("regression", -0.03),
        ]
        assert (gate.rounds, case.looks, case.asked, case.policy) == (2, 3, None, "immediate")
        assert (case.capability.title, case.capability.runs) == ("Policy checks", 5)
        assert case.capability.basis == "within 20 tasks"
        assert all(example.text and example.role == "assistant" for example in case.examples)
        assert case.world is None
        assert (case.environment.admitted, case.environment.checks, case.environment.failed) == (True, 12, [])
        assert case.environment.hash == seeded.environments["policy-checks"]
        assert case.training.iterations == 16
        assert case.training.first_reward is not None
        assert case.training.last_reward is not None
        assert case.training.first_reward < case.training.last_reward
        assert (case.cycle_id, case.cycle_state, case.decisions) == ("c-0003", "waiting", [])
        assert {change.on: change.pairs for change in case.changes} == {"environment": 40, "target": 60}
        live = await client.approvals.case(seeded.live)
        assert (live.live, live.decisions[0].who, [change.on for change in live.changes]) == (True, "ada", ["target"])
        assert (await client.approvals.case(seeded.canary)).trial == "canary"
        assert (await expect_refusal(client.approvals.case("nothing@v1"))).status == 404


async def test_pairs_are_of_one_task_and_a_failure_of_the_machinery_counts_for_nothing(
    control: Control, path: Path, seeded: Seeded
) -> None:
    name = seeded.waiting
    with write_session(control.store) as session:
        gate_fields = {"split": "gate", "cycle_id": "c-0003"}
        failure_fields = {"task_id": "b", "model": name, "reward": 0.0}
        save_trajectories(
            session,
            [
                trajectory("a-base", Outcome.SUCCESS, task_id="a", **gate_fields),
                trajectory("a-new", Outcome.FAILURE, task_id="a", model=name, reward=0.0, **gate_fields),
                trajectory("b-base", Outcome.SUCCESS, task_id="b", **gate_fields),
                trajectory("b-new", Outcome.INFRASTRUCTURE, **failure_fields, **gate_fields),
                trajectory("c-new", Outcome.SUCCESS, task_id="c", model=name, **gate_fields),
            ],
        )
        rows = {row.id: row for row in list_trajectories(session)}

    async def ask() -> None:
        async with serve_api(control, path) as client:
            case = await client.approvals.case(name)
            [on_target] = [change for change in case.changes if change.on == "target"]
            assert (on_target.pairs, on_target.infrastructure) == (61, 1)
            assert "a" in on_target.lost_tasks
            assert case.lengths == LengthsView(base=2.0, adapter=2.0)
            for pair in (*case.harmed, *case.improved):
                base, new = rows[pair.base.id], rows[pair.adapter.id]
                assert (base.source, base.split, base.task_id, base.trial) == (
                    new.source,
                    new.split,
                    new.task_id,
                    new.trial,
                )
                assert (base.model, new.model) == ("base", name)
                assert pair.change == new.reward - base.reward
            assert [pair.change for pair in case.harmed] == sorted(pair.change for pair in case.harmed)
            assert {pair.task_id for pair in case.harmed[:2]} >= {"a"}
            assert not {"b", "c"} & {pair.task_id for pair in (*case.harmed, *case.improved)}
            assert len(case.improved) == 8
            episode = await client.approvals.episode(name, "a-new")
            assert (episode.model, episode.outcome, episode.messages[1]["content"]) == (name, "failure", "I am a-new")
            assert episode.messages[0]["content"] == "Be exact. \u2028 \ufffd \x00"
            foreign = next(row.id for row in rows.values() if row.cycle_id != "c-0003")
            for unknown in (foreign, "nothing", "no/such"):
                assert (await expect_refusal(client.approvals.episode(name, unknown))).status == 404

    await ask()


async def test_the_second_of_two_people_is_told_who_was_first(control: Control, path: Path, seeded: Seeded) -> None:
    async with on_tcp(control, OPERATOR) as far, serve_api(control, path) as near:
        case = await far.approvals.case(seeded.waiting)
        mine = await near.approvals.case(seeded.waiting)
        await near.approvals.reject(mine, "harms refunds")
        for second in (far.approvals.approve(case, "reads well", "immediate"), far.approvals.reject(case, "no")):
            error = await expect_refusal(second)
            assert error.status == 409
            assert error.message.startswith(f"{seeded.waiting} has changed since: ")
            assert error.message.endswith(": harms refunds")
            assert f"rejected {seeded.waiting} on 2026-03-14 at 09:" in error.message
        assert [entry.action for entry in await far.audit()] == ["reject"]
        assert (await far.approvals.case(seeded.waiting)).decisions[0].reason == "harms refunds"


async def test_after_a_fall_only_those_who_were_shown_it_approve(
    control: Control, path: Path, store: Engine, seeded: Seeded
) -> None:
    detail = {"watch": [{"adapter": seeded.live, "fallen": True}]}
    with write_session(store) as session:
        save_stage_event(session, StageEvent("c-0003", "attribute", StageState.FINISHED, NOW, None, detail))
    async with serve_api(control, path) as client:
        case = await client.approvals.case(seeded.waiting)
        assert case.fallen == [seeded.live]
        error = await expect_refusal(client.approve(seeded.waiting, "reads well"))
        assert error.status == 409
        assert f"is held: the live system does worse than before in the environments of {seeded.live}" in error.message
        assert seeded.waiting in (await client.approvals.approve(case, "seen", "immediate")).live


async def test_more_episodes_are_asked_for_by_operators_and_once(
    control: Control, path: Path, seeded: Seeded, loop: RecordingLoop
) -> None:
    async with on_tcp(control, READER) as reader:
        case = await reader.approvals.case(seeded.waiting)
        assert (await expect_refusal(reader.approvals.more_episodes(case, "please"))).status == 403
        assert (await expect_refusal(reader.approvals.reject(case, "please"))).status == 403
    async with serve_api(control, path) as client:
        done = await client.approvals.more_episodes(case, "too few")
        assert done.detail["asked"]["look"] == 3
        assert "before" in (await client.approvals.more_episodes(case, "me too")).message
        request = (await client.approvals.case(seeded.waiting)).asked
        assert request is not None
        assert (request.look, request.reason) == (3, "too few")
        error = await expect_refusal(client.approvals.approve(case, "", "immediate"))
        assert "cannot be approved yet" in error.message
        [entry] = await client.audit()
        assert (entry.action, entry.subject, entry.detail["look"]) == ("more-episodes", seeded.waiting, 3)
        [last_event] = await client.last_events(kind="more-episodes")
        assert (last_event.subject, last_event.cycle_id, last_event.detail["reason"]) == (
            seeded.waiting,
            "c-0003",
            "too few",
        )
        await client.approvals.reject(case, "after all")
        assert (await client.approvals.case(seeded.waiting)).asked is None
    assert loop.calls == ["wake"] * 3


async def test_no_more_episodes_where_nothing_would_play_them(control: Control, path: Path, seeded: Seeded) -> None:
    with write_session(control.store) as session:
        set_cycle_state(session, "c-0003", CycleState.CANCELLED, at=NOW)
    async with serve_api(control, path) as client:
        case = await client.approvals.case(seeded.waiting)
        assert "is cancelled" in (await expect_refusal(client.approvals.more_episodes(case, ""))).message


async def test_an_empty_store_has_none(tmp_path: Path, path: Path, loop: RecordingLoop) -> None:
    empty_store = open_store(sqlite_url(tmp_path / "empty.db"))
    control = Control(load_settings(tmp_path), empty_store, loop, lambda: NOW, NOW, state="ready")  # type: ignore[arg-type]
    async with serve_api(control, path) as client:
        assert await client.approvals.list() == []
    empty_store.dispose()


async def test_a_case_reads_the_messages_of_its_examples_alone(control: Control, path: Path, seeded: Seeded) -> None:
    queries: list[tuple[str, Sequence[object]]] = []

    event.listen(control.store, "before_cursor_execute", lambda *arguments: queries.append(arguments[2:4]))
    async with serve_api(control, path) as client:
        await client.approvals.list()
        case = await client.approvals.case(seeded.waiting)
    [parameters] = [values for statement, values in queries if "messages" in statement]
    assert set(parameters) == {example.trajectory_id for example in case.examples}
    assert len(case.examples) == EXAMPLES
