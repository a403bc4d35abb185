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
from tests.integration.service.trainer import ASKED, BEGUN, CHECKPOINT, CUT_SHORT, GO, LAST
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
    """The training of alpha is a child process; everything else goes by the script."""

    async def run(self, job: Job, on_report: Callable[[Report], None]) -> Result:
        if (job.stage, job.capability) != ("train", "alpha"):
            return await super().run(job, on_report)
        self.ran.append(STAGE)
        executor = LocalExecutor(self.data_dir / "jobs", check_s=0.05)
        return await executor.run(replace(job, module=trainer.__name__), on_report)


class Stopping(Place):
    """A place whose trainings are given the time that their safe point takes."""

    def fresh(self) -> None:
        super().fresh()
        devices = self.loop.settings.devices.model_copy(update={"yield_s": 120.0})
        self.loop.settings = self.loop.settings.model_copy(update={"devices": devices})

    @property
    def run(self) -> str:
        return f"{self.cycle().id}/alpha"

    def has(self, name: str) -> Callable[[], bool]:
        """Whether the child has come so far."""
        return lambda: any((self.data_dir / "runs").rglob(name))

    def put(self, name: str) -> None:
        [begun] = (self.data_dir / "runs").rglob(BEGUN)
        (begun.parent / name).touch()

    def stop(self, caller: Caller = ADA, reason: str = "it learns nothing") -> "asyncio.Task[str]":
        async def stop() -> str:
            return (await self.control.stop_training(caller, self.run, Reason(reason=reason))).said

        return asyncio.ensure_future(stop())

    def decided(self) -> bool:
        with read_session(self.store) as opened:
            return any(STOPPED_BY in event.detail for event in list_stage_events(opened, self.cycle().id))

    def stops(self) -> list[tuple[str, str, str]]:
        """What the audit says of it."""
        with read_session(self.store) as opened:
            entries = [one for one in list_audit(opened) if one.action == "stop training"]
        return [(one.who, one.subject, one.reason) for one in entries]

    def dropped(self) -> list[tuple[str, str | None, str]]:
        with read_session(self.store) as opened:
            events = list_stage_events(opened, self.cycle().id)
        return [(one.stage, one.capability, one.detail["reason"]) for one in events if one.state.value == "failed"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Stopping]:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    yield Stopping(tmp_path, store, WithTrainer(store, tmp_path))
    store.dispose()


async def at_training(place: Stopping, act: Callable[[], Awaitable[None]], draining: asyncio.Event) -> None:
    """Run the loop to the training of alpha, let somebody ``act`` beside it, and end in order."""
    place.control.start(ADA, Reason())
    running = asyncio.create_task(place.loop.run(draining))
    await eventually_async(place.has(BEGUN))
    await act()
    draining.set()
    await running


async def stop_the_cycle(place: Stopping, how: str, draining: asyncio.Event) -> None:
    if how == "pause":
        await place.control.pause(BOB, Reason())
    elif how == "cancel":
        await place.control.cancel(BOB, place.cycle().id, Reason())
    else:
        place.control.state = "draining"
        draining.set()


def is_asked_to_end(place: Stopping) -> bool:
    work = place.loop._cycle_task
    return work is not None and bool(work.cancelling())


@pytest.mark.parametrize("stopped_first", [True, False])
@pytest.mark.parametrize("how", ["pause", "cancel", "drain"])
async def test_beside_what_ends_the_whole_cycle_it_has_its_safe_point_and_is_stopped_for_good(
    place: Stopping, how: str, stopped_first: bool
) -> None:
    draining, said = asyncio.Event(), list[str]()

    async def act() -> None:
        if stopped_first:
            stopping = place.stop()
            await eventually_async(place.has(ASKED))
            whole = asyncio.ensure_future(stop_the_cycle(place, how, draining))
            await eventually_async(lambda: is_asked_to_end(place))
        else:
            whole = asyncio.ensure_future(stop_the_cycle(place, how, draining))
            await eventually_async(place.has(ASKED))
            stopping = place.stop()
            await eventually_async(place.decided)
        for _ in range(100):  # let whoever would cut it short do so
            await asyncio.sleep(0)
        assert not stopping.done()
        place.put(GO)
        said.append(await stopping)
        await whole

    await at_training(place, act, draining)
    sentence, cycle = said[0], place.cycle().id
    became = f"{cycle} is cancelled" if how == "cancel" else f"{cycle} continues without it once it is resumed"
    assert sentence == f"the training of alpha is stopped; {became}"
    assert (place.has(CHECKPOINT)(), place.has(CUT_SHORT)()) == (True, False)
    assert place.stops() == [("ada", place.run, "it learns nothing")]
    if how == "cancel":
        assert place.cycle().state is CycleState.CANCELLED
        return
    assert place.cycle().state is CycleState.INTERRUPTED
    place.fresh()
    if how == "pause":
        place.control.resume(BOB, Reason())
    await place.until(CycleState.WAITING)
    assert place.dropped() == [("train", "alpha", DULL)]
    assert place.scripted.ran.count(STAGE) == 1
    assert "gate beta" in place.scripted.ran


def test_a_service_that_is_cut_short_does_not_forget_it(place: Stopping) -> None:
    async def killed() -> None:
        place.control.start(ADA, Reason())
        running = asyncio.create_task(place.loop.run(asyncio.Event()))
        await eventually_async(lambda: place.has(BEGUN)() or running.done())
        stopping = place.stop()
        await eventually_async(place.has(ASKED))
        assert not stopping.done()

    asyncio.run(killed())
    assert not place.has(CHECKPOINT)()
    assert place.stops() == [("ada", place.run, "it learns nothing")]
    place.fresh()
    asyncio.run(place.until(CycleState.WAITING))
    assert place.dropped() == [("train", "alpha", DULL)]
    assert place.scripted.ran.count(STAGE) == 1


async def test_who_comes_second_waits_for_the_same_safe_point_and_is_told_who_was_first(place: Stopping) -> None:
    draining, said = asyncio.Event(), list[str]()

    async def act() -> None:
        first = place.stop()
        await eventually_async(place.has(ASKED))
        second = place.stop(BOB, "the same")
        for _ in range(100):
            await asyncio.sleep(0)
        assert [first.done(), second.done()] == [False, False]
        place.put(GO)
        said.extend([await first, await second])
        await eventually_async(lambda: place.dropped())
        said.append(await place.stop(BOB, "once more"))

    await at_training(place, act, draining)
    first, second, later = said
    assert first == f"the training of alpha is stopped; {place.cycle().id} continues without it"
    assert second.startswith(f"the training of alpha was stopped before: {DULL}; {place.cycle().id}")
    assert later.startswith(f"the training of alpha was stopped before: {DULL}; {place.cycle().id}")
    assert place.stops() == [("ada", place.run, "it learns nothing")]
    assert place.dropped() == [("train", "alpha", DULL)]
    assert (place.has(CHECKPOINT)(), place.has(CUT_SHORT)()) == (True, False)


async def test_one_that_ends_by_itself_meanwhile_is_dropped_all_the_same(place: Stopping) -> None:
    draining, said = asyncio.Event(), list[str]()

    async def act() -> None:
        place.put(LAST)
        stopping = place.stop()
        await eventually_async(place.has(ASKED))
        place.put(GO)
        said.append(await stopping)
        await eventually_async(lambda: place.cycle().state is CycleState.WAITING)

    await at_training(place, act, draining)
    ended = "it had already finished, but its result is not used"
    assert said[0] == f"the training of alpha is stopped; {ended}; {place.cycle().id} continues without it"
    assert place.dropped() == [("train", "alpha", DULL)]
    assert "gate beta" in place.scripted.ran
    assert "gate alpha" not in place.scripted.ran


async def test_one_that_was_over_is_not_stopped_and_no_entry_says_so(place: Stopping) -> None:
    draining = asyncio.Event()

    async def act() -> None:
        pausing = asyncio.ensure_future(place.control.pause(BOB, Reason()))
        await eventually_async(place.has(ASKED))
        place.put(GO)
        await pausing
        with pytest.raises(Busy, match="is not running"):
            await place.stop()

    await at_training(place, act, draining)
    assert (place.stops(), place.decided()) == ([], False)
