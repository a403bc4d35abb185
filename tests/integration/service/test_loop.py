"""The loop on a real store and graph, with an executor that does what is written: order, stops, people and faults.

What kills the process is in ``tests/acceptance/chaos``; here the process lives on.
"""

import asyncio
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
from sqlmodel import select

from store.database import read_session, write_session
from store.errors import StoreUnavailable
from store.records import Cycle, CycleState
from store.repositories.attempts import AttemptState, list_quarantined, running_attempts
from store.repositories.cycles import list_stage_events
from store.repositories.events import due_notices, list_events
from store.service_tables import AttemptRow
from store.tables import CycleRow
from tests.integration.service.place import Place
from tests.integration.service.scripted import CRASHED, SUMMARY, failed
from tests.unit.store.chain import T0
from traced.api.auth import Caller
from traced.api.errors import Busy
from traced.client.models import Reason
from traced.jobs.retry import Backoff
from traced.registry import decisions
from traced.registry.decision_rules import Action

ADA = Caller("ada", "local")
END_STATES = (CycleState.FINISHED, CycleState.FAILED, CycleState.CANCELLED)
WAITING = (CycleState.WAITING, *END_STATES)


def way(capability: str) -> list[str]:
    return [f"{stage} {capability}" for stage in ("synthesize", "admit", "train", "gate")]


def kinds(place: Place) -> list[str]:
    with read_session(place.store) as session:
        return [event.kind for event in list_events(session)]


async def test_a_cycle_runs_in_order_waits_for_a_person_and_carries_on(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.control.start(ADA, Reason(reason="to see"))
    waiting = await place.run_until(*WAITING)
    assert waiting.state is CycleState.WAITING
    assert place.scripted.stage_runs[:2] == ["collect", "analyze"]
    for capability in place.scripted.capabilities:
        assert [name for name in place.scripted.stage_runs if name.endswith(capability)] == way(capability)
    place.restart()  # the service restarts before the person decides
    place.control.decide(ADA, Reason(reason="good"), partial(decisions.approve, adapter="alpha@v1"))
    assert place.cycle().state is CycleState.WAITING
    place.control.decide(ADA, Reason(reason="not needed"), partial(decisions.reject, adapter="beta@v1"))
    with caplog.at_level("INFO"):
        done = await place.run_until(*END_STATES)
    assert f"cycle {done.id} is finished. It won nothing." in caplog.messages
    assert (done.state, done.summary) == (CycleState.FINISHED, SUMMARY)
    assert place.scripted.stage_runs[-2:] == ["evaluate", "report"]
    assert len(place.scripted.stage_runs) == 14
    assert [adapter.name for adapter in place.control.adapters() if adapter.live] == ["alpha@v1"]
    assert kinds(place) == [
        *("start", "cycle begun", "cycle running", "cycle waiting"),
        *("approve", "reject", "cycle running", "stage finished", "cycle finished"),
    ]


async def test_who_waits_for_a_person_begins_no_other_cycle(place: Place) -> None:
    place.control.start(ADA, Reason())
    first = await place.run_until(*WAITING)
    summary = place.control.start(ADA, Reason(reason="again")).message
    assert summary == f"a cycle of desk starts once {first.id} has ended (now: waiting)"
    await place.run_until(CycleState.WAITING)
    assert len(place.cycles()) == 1
    with read_session(place.store) as session:
        assert [
            notice.body["subject"]
            for notice in due_notices(session, ["tell"], at=T0 + timedelta(days=2), longest_wait=timedelta(days=9))
        ] == [
            "alpha@v1",
            "beta@v1",
        ]


@pytest.mark.parametrize("stage", ["collect", "analyze", "train alpha", "gate beta"])
async def test_stopped_in_order_it_carries_on_where_it_was(place: Place, stage: str) -> None:
    place.control.start(ADA, Reason())
    await place.stop_at(stage)
    assert place.cycle().state is CycleState.INTERRUPTED
    with read_session(place.store) as session:
        assert running_attempts(session) == []
    place.restart()
    assert (await place.run_until(*WAITING)).state is CycleState.WAITING
    run_count = place.scripted.stage_runs.count(stage)
    assert run_count == 2
    assert place.scripted.stage_runs.count("collect") == (2 if stage == "collect" else 1)
    assert len(place.cycles()) == 1


async def test_a_cycle_that_was_asked_for_begins_after_a_restart_and_once(place: Place) -> None:
    place.control.start(ADA, Reason())
    place.restart()  # killed before the loop read the request
    first = await place.run_until(*WAITING)
    place.control.start(ADA, Reason(reason="again"))
    place.restart()
    for adapter in ("alpha@v1", "beta@v1"):
        place.control.decide(ADA, Reason(), partial(decisions.reject, adapter=adapter))
    await place.run_until(*END_STATES)
    second = await place.run_until(CycleState.WAITING)
    assert second.seed == first.seed + 1
    assert place.control.status().target.requested == ""
    assert len(place.cycles()) == 2


async def test_a_paused_target_does_nothing_until_it_is_resumed(place: Place) -> None:
    place.control.start(ADA, Reason())
    await place.stop_at("train alpha", lambda: place.control.pause(ADA, Reason(reason="lunch")))
    assert place.cycle().state is CycleState.INTERRUPTED
    stage_runs = list(place.scripted.stage_runs)
    place.restart()
    with pytest.raises(Busy, match="is paused"):
        place.control.start(ADA, Reason())
    await place.run_until(CycleState.INTERRUPTED)
    assert place.scripted.stage_runs == stage_runs
    place.control.resume(ADA, Reason())
    await place.run_until(CycleState.WAITING)


async def test_cancelled_it_ends_for_good_and_the_next_one_may_begin(place: Place) -> None:
    place.control.start(ADA, Reason())
    await place.stop_at(
        "admit alpha", lambda: place.control.cancel(ADA, place.cycle().id, Reason(reason="wrong settings"))
    )
    assert place.cycle().state is CycleState.CANCELLED
    assert "train alpha" not in place.scripted.stage_runs
    place.restart()
    await place.run_until(CycleState.CANCELLED)
    place.control.start(ADA, Reason(reason="once more"))
    await place.run_until(CycleState.WAITING)
    new, old = place.cycles()
    assert (old.state, new.state) == (CycleState.CANCELLED, CycleState.WAITING)
    assert new.seed == old.seed + 1


async def test_a_capability_that_is_quarantined_ends_and_the_cycle_goes_on_without_it(place: Place) -> None:
    place.scripted.ends["train alpha"] = [CRASHED] * 3
    place.control.start(ADA, Reason())
    await place.run_until(*WAITING)
    place.control.decide(ADA, Reason(), partial(decisions.approve, adapter="beta@v1"))
    assert (await place.run_until(*END_STATES)).state is CycleState.FINISHED
    assert place.scripted.stage_runs.count("train alpha") == 3
    assert "gate alpha" not in place.scripted.stage_runs
    with read_session(place.store) as session:
        (quarantined_input,) = list_quarantined(session)
        notices = due_notices(session, ["tell"], at=T0 + timedelta(days=2), longest_wait=timedelta(days=9))
        assert [notice.body["command"] for notice in notices if notice.body["kind"] == "quarantined"] == [
            f"traced release {quarantined_input.id}"
        ]
        reasons = [
            event.detail["reason"] for event in list_stage_events(session, place.cycle().id) if "reason" in event.detail
        ]
    assert (quarantined_input.key.stage, quarantined_input.key.capability) == ("train", "alpha")
    assert quarantined_input.id in reasons[0]


async def test_a_stage_of_the_whole_cycle_that_is_quarantined_fails_the_cycle(place: Place) -> None:
    place.scripted.ends["analyze"] = [CRASHED] * 3
    place.control.start(ADA, Reason())
    failed = await place.run_until(*WAITING)
    assert failed.state is CycleState.FAILED
    assert "analyze" in failed.summary["verdict"]
    place.control.start(ADA, Reason(reason="the service lives on"))
    await place.run_until(*WAITING)
    assert len(place.cycles()) == 2
    with read_session(place.store) as session:
        notices = [
            notice.body["kind"]
            for notice in due_notices(session, ["tell"], at=T0 + timedelta(days=2), longest_wait=timedelta(days=9))
        ]
    assert notices[:2] == ["quarantined", "cycle-failed"]


async def test_what_surrounds_a_stage_is_waited_for(place: Place) -> None:
    place.scripted.ends["collect"] = [failed("EngineDown", "SandboxError")] * 5
    place.control.start(ADA, Reason())
    assert (await place.run_until(*WAITING)).state is CycleState.WAITING
    assert place.scripted.stage_runs.count("collect") == 6
    with read_session(place.store) as session:
        assert list_quarantined(session) == []
        states = session.exec(select(AttemptRow.state).where(AttemptRow.stage == "collect")).all()
    assert states == [AttemptState.BLOCKED] * 5 + [AttemptState.FINISHED]


def list_notices(place: Place) -> list[tuple[str, str]]:
    """Return kind and subject of every due notice."""
    with read_session(place.store) as session:
        notices = due_notices(session, ["tell"], at=T0 + timedelta(days=900), longest_wait=timedelta(days=9000))
    return [(notice.body["kind"], notice.body["subject"]) for notice in notices]


async def test_what_holds_it_up_for_a_minute_is_told_once(place: Place) -> None:
    place.scripted.ends["collect"] = [failed("EngineDown", "SandboxError")] * 5

    async def sleep(seconds: float) -> None:
        place.days += seconds / 86_400

    place.loop.ledger = replace(place.loop.ledger, backoff=Backoff(60, 1, 60), sleep=sleep)
    place.control.start(ADA, Reason())
    await place.stop_at("analyze")
    assert [notice for notice in list_notices(place) if notice[0] == "trouble"] == [("trouble", "collect")]


@pytest.mark.parametrize("command", ["cancel", "pause"])
async def test_who_stops_a_cycle_just_before_it_is_taken_up_is_heard(place: Place, command: str) -> None:
    next_cycle = place.loop._next_cycle

    async def late(drained: "asyncio.Future[bool]") -> Cycle | None:
        cycle = await next_cycle(drained)
        if cycle is not None and not place.scripted.stage_runs:
            action = Action("ada", "local", place.now())
            with write_session(place.store) as session:
                if command == "cancel":
                    place.control._cancel(session, action, cycle.id)
                else:
                    place.control._pause(session, action)
        return cycle

    draining = asyncio.Event()
    place.control.start(ADA, Reason())
    place.loop._next_cycle = late  # type: ignore[method-assign]
    turns = iter([*[None] * 3, draining.set])

    def beat() -> None:
        if (end := next(turns, None)) is not None:
            end()
        place.loop.wake()

    place.loop.beat = beat
    await place.loop.run(draining)
    assert place.scripted.stage_runs == []
    assert place.cycle().state is (CycleState.CANCELLED if command == "cancel" else CycleState.RUNNING)


async def test_a_cycle_whose_settings_are_known_no_more_ends_with_the_reason(place: Place) -> None:
    place.control.start(ADA, Reason())
    await place.stop_at("collect")
    with write_session(place.store) as session:
        row = session.exec(select(CycleRow)).one()
        row.config = {**row.config, "analysis": {**row.config["analysis"], "of_old": 3}}
        session.add(row)
    place.restart()
    assert (await place.run_until(*END_STATES)).state is CycleState.FAILED
    place.control.start(ADA, Reason(reason="anew"))
    await place.run_until(CycleState.WAITING)
    with read_session(place.store) as session:
        (failure,) = [event for event in list_events(session) if event.kind == "cycle failed"]
    assert "was started with settings that this version rejects" in failure.detail["reason"]


async def test_a_database_that_is_gone_for_a_while_ends_neither_the_cycle_nor_the_loop(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    outages = iter([True, True, False, True])
    place.control.start(ADA, Reason())
    next_cycle, graph = place.loop._next_cycle, place.loop._run_graph

    async def flaky_due(drained: "asyncio.Future[bool]") -> Cycle | None:
        if next(outages, False):
            raise StoreUnavailable("the database is locked")
        return await next_cycle(drained)

    async def flaky_graph(cycle: Cycle) -> None:
        if next(outages, False):
            raise StoreUnavailable("the database is locked")
        await graph(cycle)

    monkeypatch.setattr(place.loop, "_next_cycle", flaky_due)
    monkeypatch.setattr(place.loop, "_run_graph", flaky_graph)
    monkeypatch.setattr("traced.daemon.loop.POLL_S", 0.01)
    assert (await place.run_until(*WAITING)).state is CycleState.WAITING


@pytest.mark.parametrize("days", [-3.0, 3.0], ids=["back", "forward"])
async def test_a_clock_that_is_stepped_loses_and_doubles_nothing(place: Place, days: float) -> None:
    place.control.start(ADA, Reason())
    await place.stop_at("train alpha")
    place.days += days
    place.restart()
    assert (await place.run_until(*WAITING)).state is CycleState.WAITING
    place.days -= days
    for adapter in ("alpha@v1", "beta@v1"):
        place.control.decide(ADA, Reason(), partial(decisions.approve, adapter=adapter))
    assert (await place.run_until(*END_STATES)).state is CycleState.FINISHED
    place.days += days
    place.control.start(ADA, Reason(reason="the next one"))
    await place.run_until(CycleState.WAITING)
    assert [cycle.seed for cycle in sorted(place.cycles(), key=lambda cycle: cycle.seed)] == [0, 1]
    assert sorted(adapter.name for adapter in place.control.adapters()) == [
        "alpha@v1",
        "alpha@v2",
        "beta@v1",
        "beta@v2",
    ]
    with read_session(place.store) as session:
        assert (running_attempts(session), list_quarantined(session)) == ([], [])
