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
from tests.integration.service.scripted import CRASHED, failed
from tests.unit.store.chain import T0
from traced.api.auth import Caller
from traced.api.errors import Busy
from traced.client.models import Reason
from traced.jobs.retry import Backoff
from traced.registry import decisions
from traced.registry.decisions import Action

ADA = Caller("ada", "local")
ENDED = (CycleState.FINISHED, CycleState.FAILED, CycleState.CANCELLED)
WAITING = (CycleState.WAITING, *ENDED)


def way(capability: str) -> list[str]:
    return [f"{stage} {capability}" for stage in ("synthesize", "admit", "train", "gate")]


def kinds(place: Place) -> list[str]:
    with read_session(place.store) as opened:
        return [event.kind for event in list_events(opened)]


async def test_a_cycle_runs_in_order_waits_for_a_person_and_carries_on(place: Place) -> None:
    place.control.start(ADA, Reason(reason="to see"))
    waiting = await place.until(*WAITING)
    assert waiting.state is CycleState.WAITING
    assert place.scripted.ran[:2] == ["collect", "analyze"]
    for capability in place.scripted.capabilities:
        assert [one for one in place.scripted.ran if one.endswith(capability)] == way(capability)
    place.fresh()  # the person takes a day, and the machine is started again meanwhile
    place.control.decide(ADA, Reason(reason="good"), partial(decisions.approve, adapter="alpha@v1"))
    assert place.cycle().state is CycleState.WAITING
    place.control.decide(ADA, Reason(reason="not needed"), partial(decisions.reject, adapter="beta@v1"))
    done = await place.until(*ENDED)
    assert (done.state, done.summary) == (CycleState.FINISHED, {"made": True})
    assert place.scripted.ran[-2:] == ["evaluate", "report"]
    assert len(place.scripted.ran) == 12
    assert [one.name for one in place.control.adapters() if one.live] == ["alpha@v1"]
    assert kinds(place) == [
        *("start", "cycle begun", "cycle running", "cycle waiting"),
        *("approve", "reject", "cycle running", "stage finished", "cycle finished"),
    ]


async def test_who_waits_for_a_person_begins_no_other_cycle(place: Place) -> None:
    place.control.start(ADA, Reason())
    first = await place.until(*WAITING)
    said = place.control.start(ADA, Reason(reason="again")).said
    assert said == f"a cycle of desk starts once {first.id} has ended (now: waiting)"
    await place.until(CycleState.WAITING)
    assert len(place.cycles()) == 1
    with read_session(place.store) as opened:
        assert [
            one.body["subject"]
            for one in due_notices(opened, ["tell"], at=T0 + timedelta(days=2), longest_wait=timedelta(days=9))
        ] == [
            "alpha@v1",
            "beta@v1",
        ]


@pytest.mark.parametrize("stage", ["collect", "analyze", "train alpha", "gate beta"])
async def test_stopped_in_order_it_carries_on_where_it_was(place: Place, stage: str) -> None:
    place.control.start(ADA, Reason())
    await place.stopped_at(stage)
    assert place.cycle().state is CycleState.INTERRUPTED
    with read_session(place.store) as opened:
        assert running_attempts(opened) == []
    place.fresh()
    assert (await place.until(*WAITING)).state is CycleState.WAITING
    again = place.scripted.ran.count(stage)
    assert again == 2
    assert place.scripted.ran.count("collect") == (2 if stage == "collect" else 1)
    assert len(place.cycles()) == 1


async def test_a_cycle_that_was_asked_for_begins_after_a_restart_and_once(place: Place) -> None:
    place.control.start(ADA, Reason())
    place.fresh()  # killed before the loop had looked
    first = await place.until(*WAITING)
    place.control.start(ADA, Reason(reason="again"))
    place.fresh()
    for adapter in ("alpha@v1", "beta@v1"):
        place.control.decide(ADA, Reason(), partial(decisions.reject, adapter=adapter))
    await place.until(*ENDED)
    second = await place.until(CycleState.WAITING)
    assert second.seed == first.seed + 1
    assert place.control.status().target.asked_for == ""
    assert len(place.cycles()) == 2


async def test_a_paused_target_does_nothing_until_it_is_resumed(place: Place) -> None:
    place.control.start(ADA, Reason())
    await place.stopped_at("train alpha", lambda: place.control.pause(ADA, Reason(reason="lunch")))
    assert place.cycle().state is CycleState.INTERRUPTED
    before = list(place.scripted.ran)
    place.fresh()
    with pytest.raises(Busy, match="is paused"):
        place.control.start(ADA, Reason())
    await place.until(CycleState.INTERRUPTED)
    assert place.scripted.ran == before
    place.control.resume(ADA, Reason())
    await place.until(CycleState.WAITING)


async def test_cancelled_it_ends_for_good_and_the_next_one_may_begin(place: Place) -> None:
    place.control.start(ADA, Reason())
    await place.stopped_at(
        "admit alpha", lambda: place.control.cancel(ADA, place.cycle().id, Reason(reason="wrong settings"))
    )
    assert place.cycle().state is CycleState.CANCELLED
    assert "train alpha" not in place.scripted.ran
    place.fresh()
    await place.until(CycleState.CANCELLED)
    place.control.start(ADA, Reason(reason="once more"))
    await place.until(CycleState.WAITING)
    new, old = place.cycles()
    assert (old.state, new.state) == (CycleState.CANCELLED, CycleState.WAITING)
    assert new.seed == old.seed + 1


async def test_a_capability_that_is_parked_ends_and_the_cycle_goes_on_without_it(place: Place) -> None:
    place.scripted.ends["train alpha"] = [CRASHED] * 3
    place.control.start(ADA, Reason())
    await place.until(*WAITING)
    place.control.decide(ADA, Reason(), partial(decisions.approve, adapter="beta@v1"))
    assert (await place.until(*ENDED)).state is CycleState.FINISHED
    assert place.scripted.ran.count("train alpha") == 3
    assert "gate alpha" not in place.scripted.ran
    with read_session(place.store) as opened:
        (parked,) = list_quarantined(opened)
        told = due_notices(opened, ["tell"], at=T0 + timedelta(days=2), longest_wait=timedelta(days=9))
        assert [one.body["command"] for one in told if one.body["kind"] == "parked"] == [f"traced release {parked.id}"]
        reasons = [
            one.detail["reason"] for one in list_stage_events(opened, place.cycle().id) if "reason" in one.detail
        ]
    assert (parked.key.stage, parked.key.capability) == ("train", "alpha")
    assert parked.id in reasons[0]


async def test_a_stage_of_the_whole_cycle_that_is_parked_fails_the_cycle(place: Place) -> None:
    place.scripted.ends["analyze"] = [CRASHED] * 3
    place.control.start(ADA, Reason())
    assert (await place.until(*WAITING)).state is CycleState.FAILED
    place.control.start(ADA, Reason(reason="the service lives on"))
    await place.until(*WAITING)
    assert len(place.cycles()) == 2
    with read_session(place.store) as opened:
        told = [
            one.body["kind"]
            for one in due_notices(opened, ["tell"], at=T0 + timedelta(days=2), longest_wait=timedelta(days=9))
        ]
    assert told[:2] == ["parked", "cycle-failed"]


async def test_what_surrounds_a_stage_is_waited_for(place: Place) -> None:
    place.scripted.ends["collect"] = [failed("EngineDown", "SandboxError")] * 5
    place.control.start(ADA, Reason())
    assert (await place.until(*WAITING)).state is CycleState.WAITING
    assert place.scripted.ran.count("collect") == 6
    with read_session(place.store) as opened:
        assert list_quarantined(opened) == []
        states = opened.exec(select(AttemptRow.state).where(AttemptRow.stage == "collect")).all()
    assert states == [AttemptState.BLOCKED] * 5 + [AttemptState.FINISHED]


def told(place: Place) -> list[tuple[str, str]]:
    """Kind and subject of every notice."""
    with read_session(place.store) as opened:
        due = due_notices(opened, ["tell"], at=T0 + timedelta(days=900), longest_wait=timedelta(days=9000))
    return [(one.body["kind"], one.body["subject"]) for one in due]


async def test_what_holds_it_up_for_a_minute_is_told_once(place: Place) -> None:
    place.scripted.ends["collect"] = [failed("EngineDown", "SandboxError")] * 5

    async def sleep(seconds: float) -> None:
        place.days += seconds / 86_400

    place.loop.ledger = replace(place.loop.ledger, backoff=Backoff(60, 1, 60), sleep=sleep)
    place.control.start(ADA, Reason())
    await place.stopped_at("analyze")
    assert [one for one in told(place) if one[0] == "trouble"] == [("trouble", "collect")]


@pytest.mark.parametrize("act", ["cancel", "pause"])
async def test_who_stops_a_cycle_just_before_it_is_taken_up_is_heard(place: Place, act: str) -> None:
    due = place.loop._next_cycle

    def late() -> Cycle | None:
        cycle = due()
        if cycle is not None and not place.scripted.ran:
            who = Action("ada", "local", place.now(), "", submitted_by="")
            place.control._cancel(who, cycle.id) if act == "cancel" else place.control._pause(who)
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
    assert place.scripted.ran == []
    assert place.cycle().state is (CycleState.CANCELLED if act == "cancel" else CycleState.RUNNING)


async def test_a_cycle_whose_settings_are_known_no_more_ends_with_the_reason(place: Place) -> None:
    place.control.start(ADA, Reason())
    await place.stopped_at("collect")
    with write_session(place.store) as opened:
        row = opened.exec(select(CycleRow)).one()
        row.config = {**row.config, "analysis": {**row.config["analysis"], "of_old": 3}}
        opened.add(row)
    place.fresh()
    assert (await place.until(*ENDED)).state is CycleState.FAILED
    place.control.start(ADA, Reason(reason="anew"))
    await place.until(CycleState.WAITING)
    with read_session(place.store) as opened:
        (ended,) = [one for one in list_events(opened) if one.kind == "cycle failed"]
    assert "was started with settings that this version rejects" in ended.detail["reason"]


async def test_a_database_that_is_gone_for_a_while_ends_neither_the_cycle_nor_the_loop(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = iter([True, True, False, True])
    place.control.start(ADA, Reason())
    due, graph = place.loop._next_cycle, place.loop._run_graph

    def flaky_due() -> Cycle | None:
        if next(gone, False):
            raise StoreUnavailable("the database is locked")
        return due()

    async def flaky_graph(cycle: Cycle) -> None:
        if next(gone, False):
            raise StoreUnavailable("the database is locked")
        await graph(cycle)

    monkeypatch.setattr(place.loop, "_next_cycle", flaky_due)
    monkeypatch.setattr(place.loop, "_run_graph", flaky_graph)
    monkeypatch.setattr("traced.daemon.loop.POLL_S", 0.01)
    assert (await place.until(*WAITING)).state is CycleState.WAITING


@pytest.mark.parametrize("days", [-3.0, 3.0], ids=["back", "forward"])
async def test_a_clock_that_is_stepped_loses_and_doubles_nothing(place: Place, days: float) -> None:
    place.control.start(ADA, Reason())
    await place.stopped_at("train alpha")
    place.days += days
    place.fresh()
    assert (await place.until(*WAITING)).state is CycleState.WAITING
    place.days -= days
    for adapter in ("alpha@v1", "beta@v1"):
        place.control.decide(ADA, Reason(), partial(decisions.approve, adapter=adapter))
    assert (await place.until(*ENDED)).state is CycleState.FINISHED
    place.days += days
    place.control.start(ADA, Reason(reason="the next one"))
    await place.until(CycleState.WAITING)
    assert [cycle.seed for cycle in sorted(place.cycles(), key=lambda cycle: cycle.seed)] == [0, 1]
    assert sorted(one.name for one in place.control.adapters()) == ["alpha@v1", "alpha@v2", "beta@v1", "beta@v2"]
    with read_session(place.store) as opened:
        assert (running_attempts(opened), list_quarantined(opened)) == ([], [])
