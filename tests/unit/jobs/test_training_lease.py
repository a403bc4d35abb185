"""Training on a leased device: a real store, a scripted probe, a clock moved by hand, and a trainer that is a task."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from store.database import open_store, sqlite_url, write_session
from store.repositories.attempts import AttemptState
from store.repositories.leases import acquire, list_leases, release, request_return
from tests.unit.jobs.clock import ManualClock
from traced.core.time_windows import parse_windows
from traced.jobs.devices import DeviceReading, ForeignProcess, Readings, ScriptedProbe
from traced.jobs.idleness import Rules, Thresholds
from traced.jobs.leases import DeviceAccess, LeaseRequest, run_on_device
from traced.processes.job import Preempted, Report

QUIET = DeviceReading("cpu", "cpu", "a CPU", 100, 10, 0.0)
BUSY = replace(QUIET, utilisation=0.9)
FULL = replace(QUIET, memory_used=99)
LIMITS = Rules(Thresholds(0.25, 0.8), Thresholds(0.1, 0.1), idle_s=20, poll_s=5, train_on="cpu", busy_s=10, yield_s=60)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    yield engine
    engine.dispose()


@dataclass
class Training:
    """A trainer of ``iterations``, each a step of the test's; it pauses, fails or hangs as it is told."""

    store: Engine
    pause: Path
    clock: ManualClock = field(default_factory=ManualClock)
    script: list[tuple[float, Readings]] = field(default_factory=lambda: [(0, Readings((QUIET,)))])
    limits: Rules = LIMITS
    deaf: bool = False
    done: int = 0
    runs: int = 0
    running: bool = False
    go: bool = False
    told: list[Report] = field(default_factory=list)
    stopped: int = 0

    async def work(self, device: DeviceReading) -> str:
        self.runs += 1
        self.running = True
        try:
            while not self.go:
                if self.pause.exists() and not self.deaf:
                    self.done += 1
                    raise Preempted("at a checkpoint")
                await asyncio.sleep(0)
            return device.id
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        finally:
            self.running = False

    def lent(self) -> DeviceAccess:
        probe = ScriptedProbe(self.script, lambda: self.clock.seconds)
        wish = LeaseRequest("me", "train a", None, timedelta(seconds=1000))
        return DeviceAccess(self.store, probe, lambda: self.limits, wish, self.clock.clocks)

    def play(self, scene: Callable[[], Coroutine[Any, Any, None]]) -> str:
        async def main() -> str:
            task = asyncio.create_task(run_on_device(self.lent(), self.pause, self.work, self.told.append))
            await scene()
            self.go = True
            await self.until(task.done)
            return task.result()

        return asyncio.run(asyncio.wait_for(main(), 60))

    async def until(self, condition: Callable[[], bool], at_most: float = 1000) -> None:
        """Let time pass until it holds."""
        begun = self.clock.seconds
        while not condition():
            assert self.clock.seconds - begun < at_most, self.told
            self.clock.tick(1)
            await asyncio.to_thread(lambda: None)
            await asyncio.wait({asyncio.ensure_future(asyncio.to_thread(lambda: None))}, timeout=0.01)

    def holders(self) -> list[str]:
        with write_session(self.store) as opened:
            return [lease.holder for lease in list_leases(opened)]

    def ask_back(self) -> None:
        with write_session(self.store) as opened:
            assert request_return(opened, "cpu", "serving", self.clock.now()) is not None

    @property
    def waited_for(self) -> list[str]:
        return [report.data["for"] for report in self.told]


@pytest.fixture
def training(store: Engine, tmp_path: Path) -> Training:
    return Training(store, tmp_path / "run" / "pause")


def test_it_waits_for_rest_holds_the_lease_and_gives_it_back(training: Training) -> None:
    async def scene() -> None:
        await training.until(lambda: training.running)
        assert training.clock.seconds >= LIMITS.idle_s
        assert training.holders() == ["me"]

    assert training.play(scene) == "cpu"
    assert training.holders() == []
    assert len(training.waited_for) == 1  # the seconds at rest are no news
    assert training.told[0].data["after"] != AttemptState.BLOCKED  # which would be a trouble that people are told of
    assert "of 20 s" in training.waited_for[0]


def test_it_says_why_it_waits(training: Training) -> None:
    training.script = [(0, Readings((BUSY,))), (30, Readings((QUIET,)))]
    with write_session(training.store) as opened:
        acquire(opened, "cpu", "else", "serve", None, at=training.clock.now(), ttl=timedelta(seconds=200))

    async def scene() -> None:
        await training.until(lambda: any("else has it" in said for said in training.waited_for))
        with write_session(training.store) as opened:
            release(opened, "cpu", "else")

    training.play(scene)
    assert [said.partition(",")[0].partition(" for")[0] for said in training.waited_for[:2]] == [
        "cpu: utilisation 90% is over 25%",
        "cpu: idle",
    ]


def test_it_gives_way_at_a_checkpoint_and_goes_on_later(training: Training) -> None:
    async def scene() -> None:
        await training.until(lambda: training.running)
        training.ask_back()
        await training.until(lambda: training.done == 1)
        await training.until(lambda: training.runs == 2)
        assert not training.pause.exists()

    assert training.play(scene) == "cpu"
    assert (training.stopped, training.runs) == (0, 2)
    assert "cpu was given back: serving asks for it back" in training.waited_for


def test_a_trainer_that_reaches_no_checkpoint_is_stopped(training: Training) -> None:
    training.deaf = True

    async def scene() -> None:
        await training.until(lambda: training.running)
        training.ask_back()
        await training.until(training.pause.exists)
        asked = training.clock.seconds
        await training.until(lambda: training.stopped == 1)
        assert training.clock.seconds - asked >= 55
        training.deaf = False
        await training.until(lambda: training.runs == 2)

    assert training.play(scene) == "cpu"


def test_quiet_hours_end_it_and_train_hours_do_not(training: Training) -> None:
    hours = parse_windows("09:00-09:02"), parse_windows("09:04-09:06")
    training.limits = replace(LIMITS, hours=hours[0], quiet=hours[1], zone=training.clock.now().tzinfo)

    async def scene() -> None:
        await training.until(lambda: training.running)
        await training.until(lambda: any("in the quiet hours 09:04-09:06" in said for said in training.waited_for))
        assert training.done == 1
        assert 240 <= training.clock.seconds < 300

    async def whole() -> None:
        task = asyncio.create_task(run_on_device(training.lent(), training.pause, training.work, training.told.append))
        await scene()
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(asyncio.wait_for(whole(), 60))
    assert training.holders() == []


def test_rules_that_change_reach_a_training_that_waits_and_one_that_runs(training: Training) -> None:
    night = replace(LIMITS, hours=parse_windows("22:00-06:00"), zone=training.clock.now().tzinfo)
    training.limits = night

    async def scene() -> None:
        await training.until(lambda: any("22:00-06:00" in said for said in training.waited_for))
        training.limits = replace(night, hours=())
        await training.until(lambda: training.running)
        training.limits = replace(night, quiet=parse_windows("08:00-18:00"))
        await training.until(lambda: training.done == 1 and not training.running)
        training.limits = replace(LIMITS, yield_s=1)
        await training.until(lambda: training.running)

    assert training.play(scene) == "cpu"


@pytest.mark.parametrize(
    ("reading", "gives_way"),
    [
        (BUSY, True),
        (FULL, False),  # its own memory counts as anybody's
        (replace(QUIET, foreign=(ForeignProcess(1, None),)), True),
        (replace(QUIET, kind="cuda", utilisation=1.0, memory_used=90), False),
    ],
)
def test_foreign_load_that_lasts_ends_it_and_its_own_does_not(
    training: Training, reading: DeviceReading, gives_way: bool
) -> None:
    blip = [(60.0, Readings((BUSY,))), (66.0, Readings((QUIET,)))]
    training.script = [*training.script, *blip, (100.0, Readings((reading,))), (130.0, Readings((QUIET,)))]

    async def scene() -> None:
        await training.until(lambda: training.clock.seconds >= 99)
        assert (training.running, training.done) == (True, 0)
        await training.until(lambda: training.clock.seconds >= 200)

    training.play(scene)
    assert training.runs == 1 + gives_way


def test_a_lost_lease_stops_it_at_once(training: Training) -> None:
    async def scene() -> None:
        await training.until(lambda: training.running)
        with write_session(training.store) as opened:
            release(opened, "cpu", "me")
        await training.until(lambda: training.stopped == 1)
        assert not training.pause.exists()

    training.play(scene)


def test_what_the_work_raises_passes(training: Training) -> None:
    async def fails(device: DeviceReading) -> str:
        raise KeyError(device.id)

    async def whole() -> None:
        task = asyncio.create_task(run_on_device(training.lent(), training.pause, fails, training.told.append))
        await training.until(task.done)
        await task

    with pytest.raises(KeyError):
        asyncio.run(asyncio.wait_for(whole(), 60))
    assert training.holders() == []


@pytest.mark.parametrize("deaf", [False, True])
def test_a_drain_waits_for_the_checkpoint_and_a_second_one_does_not(training: Training, deaf: bool) -> None:
    training.deaf = deaf

    async def main() -> None:
        task = asyncio.create_task(run_on_device(training.lent(), training.pause, training.work, training.told.append))
        await training.until(lambda: training.running)
        task.cancel()
        await training.until(training.pause.exists)
        if deaf:
            assert not task.done()
            task.cancel()
        await training.until(task.done)
        assert task.cancelled()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert (training.done, training.stopped) == ((0, 1) if deaf else (1, 0))
    assert training.holders() == []


def test_a_drain_while_it_gives_way_waits_for_the_same_checkpoint(training: Training) -> None:
    training.deaf = True

    async def main() -> None:
        task = asyncio.create_task(run_on_device(training.lent(), training.pause, training.work, training.told.append))
        await training.until(lambda: training.running)
        training.ask_back()
        await training.until(training.pause.exists)
        task.cancel()
        for _ in range(20):  # let it be cut short, if it is
            await asyncio.sleep(0)
        training.deaf = False
        await training.until(task.done)
        assert task.cancelled()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert (training.done, training.stopped) == (1, 0)
    assert training.holders() == []
