"""A training that a person stops, a child process, beside whatever else ends it: one safe point, one decision, kept."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from store.database import open_store, read_session, sqlite_url
from store.records import CycleState
from store.repositories.cycles import list_stage_events
from store.repositories.events import list_audit
from tests.integration.service import trainer
from tests.integration.service.place import Place
from tests.integration.service.scripted import Scripted
from tests.integration.service.trainer import CHECKPOINT, CUT_SHORT, LAST, PAUSE_REQUESTED, RELEASE, STARTED
from tests.waiting import eventually_async
from traced.api.auth import Caller
from traced.api.errors import Busy
from traced.client.models import Reason
from traced.pipeline.train import STOPPED_BY
from traced.processes.executor import LocalExecutor
from traced.processes.job import Job, Report, Result

ADA, BOB = Caller("ada", "local"), Caller("bob", "local")
DULL = "ada stopped the training: it learns nothing"
STAGE = "train alpha"


@dataclass
class WithTrainer(Scripted):
    """Executor that runs the training of alpha in a child process; all other stages are scripted."""

    async def run(self, job: Job, on_report: Callable[[Report], None]) -> Result:
        if (job.stage, job.capability) != ("train", "alpha"):
            return await super().run(job, on_report)
        self.stage_runs.append(STAGE)
        executor = LocalExecutor(self.data_dir / "jobs", check_s=0.05)
        return await executor.run(replace(job, module=trainer.__name__), on_report)


class Stopping(Place):
    """Place whose ``devices.yield_s`` is long enough for a training to reach its safe point."""

    def restart(self) -> None:
        super().restart()
        devices = self.loop.settings.devices.model_copy(update={"yield_s": 120.0})
        self.loop.settings = self.loop.settings.model_copy(update={"devices": devices})

    @property
    def run(self) -> str:
        return f"{self.cycle().id}/alpha"

    def has(self, name: str) -> Callable[[], bool]:
        """Return a condition that is true once the child has written the file ``name``."""
        return lambda: any((self.data_dir / "runs").rglob(name))

    def put(self, name: str) -> None:
        [marker] = (self.data_dir / "runs").rglob(STARTED)
        (marker.parent / name).touch()

    def stop(self, caller: Caller = ADA, reason: str = "it learns nothing") -> "asyncio.Task[str]":
        async def stop() -> str:
            return (await self.control.stop_training(caller, self.run, Reason(reason=reason))).message

        return asyncio.ensure_future(stop())

    def is_stop_decided(self) -> bool:
        with read_session(self.store) as session:
            return any(STOPPED_BY in event.detail for event in list_stage_events(session, self.cycle().id))

    def stops(self) -> list[tuple[str, str, str]]:
        """Return the audit entries of stopped trainings."""
        with read_session(self.store) as session:
            entries = [entry for entry in list_audit(session) if entry.action == "stop training"]
        return [(entry.who, entry.subject, entry.reason) for entry in entries]

    def dropped(self) -> list[tuple[str, str | None, str]]:
        with read_session(self.store) as session:
            events = list_stage_events(session, self.cycle().id)
        return [
            (event.stage, event.capability, event.detail["reason"]) for event in events if event.state.value == "failed"
        ]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Stopping]:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    yield Stopping(tmp_path, store, WithTrainer(store, tmp_path))
    store.dispose()


async def at_training(place: Stopping, action: Callable[[], Awaitable[None]], draining: asyncio.Event) -> None:
    """Run the loop until alpha trains, await ``action`` while it runs, then drain the loop."""
    place.control.start(ADA, Reason())
    running = asyncio.create_task(place.loop.run(draining))
    await eventually_async(place.has(STARTED))
    await action()
    draining.set()
    await running


async def stop_the_cycle(place: Stopping, method: str, draining: asyncio.Event) -> None:
    if method == "pause":
        await place.control.pause(BOB, Reason())
    elif method == "cancel":
        await place.control.cancel(BOB, place.cycle().id, Reason())
    else:
        place.control.state = "draining"
        draining.set()


def is_asked_to_end(place: Stopping) -> bool:
    work = place.loop._cycle_task
    return work is not None and bool(work.cancelling())


@pytest.mark.parametrize("stopped_first", [True, False])
@pytest.mark.parametrize("method", ["pause", "cancel", "drain"])
async def test_beside_what_ends_the_whole_cycle_it_has_its_safe_point_and_is_stopped_for_good(
    place: Stopping, method: str, stopped_first: bool
) -> None:
    draining, messages = asyncio.Event(), list[str]()

    async def act() -> None:
        if stopped_first:
            stopping = place.stop()
            await eventually_async(place.has(PAUSE_REQUESTED))
            cycle_stop = asyncio.ensure_future(stop_the_cycle(place, method, draining))
            await eventually_async(lambda: is_asked_to_end(place))
        else:
            cycle_stop = asyncio.ensure_future(stop_the_cycle(place, method, draining))
            await eventually_async(place.has(PAUSE_REQUESTED))
            stopping = place.stop()
            await eventually_async(place.is_stop_decided)
        for _ in range(100):  # give other tasks time to cut the training short
            await asyncio.sleep(0)
        assert not stopping.done()
        place.put(RELEASE)
        messages.append(await stopping)
        await cycle_stop

    await at_training(place, act, draining)
    sentence, cycle = messages[0], place.cycle().id
    became = f"{cycle} is cancelled" if method == "cancel" else f"{cycle} continues without it once it is resumed"
    assert sentence == f"the training of alpha is stopped; {became}"
    assert (place.has(CHECKPOINT)(), place.has(CUT_SHORT)()) == (True, False)
    assert place.stops() == [("ada", place.run, "it learns nothing")]
    if method == "cancel":
        assert place.cycle().state is CycleState.CANCELLED
        return
    assert place.cycle().state is CycleState.INTERRUPTED
    place.restart()
    if method == "pause":
        place.control.resume(BOB, Reason())
    await place.run_until(CycleState.WAITING)
    assert place.dropped() == [("train", "alpha", DULL)]
    assert place.scripted.stage_runs.count(STAGE) == 1
    assert "gate beta" in place.scripted.stage_runs


def test_a_service_that_is_cut_short_does_not_forget_it(place: Stopping) -> None:
    async def killed() -> None:
        place.control.start(ADA, Reason())
        running = asyncio.create_task(place.loop.run(asyncio.Event()))
        await eventually_async(lambda: place.has(STARTED)() or running.done())
        stopping = place.stop()
        await eventually_async(place.has(PAUSE_REQUESTED))
        assert not stopping.done()

    asyncio.run(killed())
    assert not place.has(CHECKPOINT)()
    assert place.stops() == [("ada", place.run, "it learns nothing")]
    place.restart()
    asyncio.run(place.run_until(CycleState.WAITING))
    assert place.dropped() == [("train", "alpha", DULL)]
    assert place.scripted.stage_runs.count(STAGE) == 1


async def test_who_comes_second_waits_for_the_same_safe_point_and_is_told_who_was_first(place: Stopping) -> None:
    draining, messages = asyncio.Event(), list[str]()

    async def act() -> None:
        first = place.stop()
        await eventually_async(place.has(PAUSE_REQUESTED))
        second = place.stop(BOB, "the same")
        for _ in range(100):
            await asyncio.sleep(0)
        assert [first.done(), second.done()] == [False, False]
        place.put(RELEASE)
        messages.extend([await first, await second])
        await eventually_async(lambda: place.dropped())
        messages.append(await place.stop(BOB, "once more"))

    await at_training(place, act, draining)
    first, second, later = messages
    assert first == f"the training of alpha is stopped; {place.cycle().id} continues without it"
    assert second.startswith(f"the training of alpha was stopped before: {DULL}; {place.cycle().id}")
    assert later.startswith(f"the training of alpha was stopped before: {DULL}; {place.cycle().id}")
    assert place.stops() == [("ada", place.run, "it learns nothing")]
    assert place.dropped() == [("train", "alpha", DULL)]
    assert (place.has(CHECKPOINT)(), place.has(CUT_SHORT)()) == (True, False)


async def test_one_that_ends_by_itself_meanwhile_is_dropped_all_the_same(place: Stopping) -> None:
    draining, messages = asyncio.Event(), list[str]()

    async def act() -> None:
        place.put(LAST)
        stopping = place.stop()
        await eventually_async(place.has(PAUSE_REQUESTED))
        place.put(RELEASE)
        messages.append(await stopping)
        await eventually_async(lambda: place.cycle().state is CycleState.WAITING)

    await at_training(place, act, draining)
    note = "it had already finished, but its result is not used"
    assert messages[0] == f"the training of alpha is stopped; {note}; {place.cycle().id} continues without it"
    assert place.dropped() == [("train", "alpha", DULL)]
    assert "gate beta" in place.scripted.stage_runs
    assert "gate alpha" not in place.scripted.stage_runs


async def test_one_that_was_over_is_not_stopped_and_no_entry_says_so(place: Stopping) -> None:
    draining = asyncio.Event()

    async def act() -> None:
        pausing = asyncio.ensure_future(place.control.pause(BOB, Reason()))
        await eventually_async(place.has(PAUSE_REQUESTED))
        place.put(RELEASE)
        await pausing
        with pytest.raises(Busy, match="is not running"):
            await place.stop()

    await at_training(place, act, draining)
    assert (place.stops(), place.is_stop_decided()) == ([], False)
