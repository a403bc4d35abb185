"""Training on a leased device: a real store, a scripted probe, a clock moved by hand, and a trainer that is a task."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from store.database import open_store, read_session, sqlite_url, write_session
from store.repositories.attempts import AttemptState
from store.repositories.events import last_event
from store.repositories.leases import acquire, list_leases, release, request_return
from tests.unit.jobs.clock import ManualClock
from traced.core.time_windows import parse_windows
from traced.jobs.devices import DeviceReading, ForeignProcess, Readings, ScriptedProbe
from traced.jobs.idleness import Rules, Thresholds
from traced.jobs.leases import MEMORY_EVENT, DeviceAccess, LeaseRequest, run_on_device
from traced.processes.job import Preempted, Report

IDLE_CPU = DeviceReading("cpu", "cpu", "a CPU", 100, 10, 0.0)
BUSY = replace(IDLE_CPU, utilisation=0.9)
FULL = replace(IDLE_CPU, memory_used=99)
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
    script: list[tuple[float, Readings]] = field(default_factory=lambda: [(0, Readings((IDLE_CPU,)))])
    limits: Rules = LIMITS
    deaf: bool = False
    done: int = 0
    runs: int = 0
    running: bool = False
    may_finish: bool = False
    reports: list[Report] = field(default_factory=list)
    stopped: int = 0

    async def work(self, devices: tuple[DeviceReading, ...]) -> str:
        self.runs += 1
        self.running = True
        try:
            while not self.may_finish:
                if self.pause.exists() and not self.deaf:
                    self.done += 1
                    raise Preempted("at a checkpoint")
                await asyncio.sleep(0)
            return devices[0].id
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        finally:
            self.running = False

    def start(self) -> "asyncio.Task[Any]":
        """Run the training in a task."""
        return asyncio.create_task(run_on_device(self.access(), self.pause, self.work, self.reports.append))

    def access(self) -> DeviceAccess:
        probe = ScriptedProbe(self.script, lambda: self.clock.seconds)
        request = LeaseRequest("me", "train a", None, timedelta(seconds=1000))
        return DeviceAccess(self.store, probe, lambda: self.limits, request, self.clock.clocks)

    def play(self, scene: Callable[[], Coroutine[Any, Any, None]]) -> str:
        async def main() -> str:
            task = asyncio.create_task(run_on_device(self.access(), self.pause, self.work, self.reports.append))
            await scene()
            self.may_finish = True
            await self.wait_until(task.done)
            return task.result()

        return asyncio.run(asyncio.wait_for(main(), 60))

    async def wait_until(self, condition: Callable[[], bool], at_most: float = 1000) -> None:
        """Let time pass until it holds."""
        start_s = self.clock.seconds
        while not condition():
            assert self.clock.seconds - start_s < at_most, self.reports
            sleeps = self.clock.sleeps
            await self.clock.settle(sleeps + self.clock.tick(1))
            await asyncio.sleep(0.001)

    def holders(self) -> list[str]:
        with write_session(self.store) as session:
            return [lease.holder for lease in list_leases(session)]

    def ask_back(self) -> None:
        with write_session(self.store) as session:
            assert request_return(session, "cpu", "serving", self.clock.now()) is not None

    @property
    def waited_for(self) -> list[str]:
        return [report.data["for"] for report in self.reports]


@pytest.fixture
def training(store: Engine, tmp_path: Path) -> Training:
    return Training(store, tmp_path / "run" / "pause")


def test_training_waits_for_idleness_and_releases_its_lease(training: Training) -> None:
    async def scene() -> None:
        await training.wait_until(lambda: training.running)
        assert training.clock.seconds >= LIMITS.idle_s
        assert training.holders() == ["me"]

    assert training.play(scene) == "cpu"
    assert training.holders() == []
    assert len(training.waited_for) == 1  # the seconds at rest are no news
    assert training.reports[0].data["after"] != AttemptState.BLOCKED  # which would be a trouble that people are told of
    assert "of 20 s" in training.waited_for[0]


def test_waits_are_reported_with_their_reason(training: Training) -> None:
    training.script = [(0, Readings((BUSY,))), (30, Readings((IDLE_CPU,)))]
    with write_session(training.store) as session:
        acquire(session, "cpu", "else", "serve", None, at=training.clock.now(), ttl=timedelta(seconds=200))

    async def scene() -> None:
        await training.wait_until(lambda: any("leased to else" in text for text in training.waited_for))
        with write_session(training.store) as session:
            release(session, "cpu", "else")

    training.play(scene)
    assert [text.partition(",")[0].partition(" for")[0] for text in training.waited_for[:2]] == [
        "cpu: utilisation 90% is over 25%",
        "cpu: idle",
    ]


def test_preemption_stops_at_a_checkpoint_and_resumes_later(training: Training) -> None:
    async def scene() -> None:
        await training.wait_until(lambda: training.running)
        training.ask_back()
        await training.wait_until(lambda: training.done == 1)
        await training.wait_until(lambda: training.runs == 2)
        assert not training.pause.exists()

    assert training.play(scene) == "cpu"
    assert (training.stopped, training.runs) == (0, 2)
    assert "the lease on cpu was returned: serving requested it back" in training.waited_for


def test_a_trainer_that_reaches_no_checkpoint_is_stopped(training: Training) -> None:
    training.deaf = True

    async def scene() -> None:
        await training.wait_until(lambda: training.running)
        training.ask_back()
        await training.wait_until(training.pause.exists)
        requested_s = training.clock.seconds
        await training.wait_until(lambda: training.stopped == 1)
        assert training.clock.seconds - requested_s >= 55
        training.deaf = False
        await training.wait_until(lambda: training.runs == 2)

    assert training.play(scene) == "cpu"


async def test_quiet_hours_end_it_and_train_hours_do_not(training: Training) -> None:
    hours = parse_windows("09:00-09:02"), parse_windows("09:04-09:06")
    training.limits = replace(LIMITS, hours=hours[0], quiet_windows=hours[1], zone=training.clock.now().tzinfo)

    async def scene() -> None:
        await training.wait_until(lambda: training.running)
        await training.wait_until(lambda: any("in the quiet hours 09:04-09:06" in text for text in training.waited_for))
        assert training.done == 1
        assert 240 <= training.clock.seconds < 300

    async def run_scene() -> None:
        task = asyncio.create_task(
            run_on_device(training.access(), training.pause, training.work, training.reports.append)
        )
        await scene()
        task.cancel()
        await asyncio.wait({task})

    await asyncio.wait_for(run_scene(), 60)
    assert training.holders() == []


def test_rules_that_change_reach_a_training_that_waits_and_one_that_runs(training: Training) -> None:
    night = replace(LIMITS, hours=parse_windows("22:00-06:00"), zone=training.clock.now().tzinfo)
    training.limits = night

    async def scene() -> None:
        await training.wait_until(lambda: any("22:00-06:00" in text for text in training.waited_for))
        training.limits = replace(night, hours=())
        await training.wait_until(lambda: training.running)
        training.limits = replace(night, quiet_windows=parse_windows("08:00-18:00"))
        await training.wait_until(lambda: training.done == 1 and not training.running)
        training.limits = replace(LIMITS, yield_s=1)
        await training.wait_until(lambda: training.running)

    assert training.play(scene) == "cpu"


@pytest.mark.parametrize(
    ("device", "gives_way"),
    [
        (BUSY, True),
        (FULL, False),  # its own memory counts as anybody's
        (replace(IDLE_CPU, foreign=(ForeignProcess(1, None),)), True),
        (replace(IDLE_CPU, kind="cuda", utilisation=1.0, memory_used=90), False),
    ],
)
def test_foreign_load_that_lasts_ends_it_and_its_own_does_not(
    training: Training, device: DeviceReading, gives_way: bool
) -> None:
    blip = [(60.0, Readings((BUSY,))), (66.0, Readings((IDLE_CPU,)))]
    training.script = [*training.script, *blip, (100.0, Readings((device,))), (130.0, Readings((IDLE_CPU,)))]

    async def scene() -> None:
        await training.wait_until(lambda: training.clock.seconds >= 99)
        assert (training.running, training.done) == (True, 0)
        await training.wait_until(lambda: training.clock.seconds >= 200)

    training.play(scene)
    assert training.runs == 1 + gives_way


def test_foreign_load_on_another_device_ends_nothing(training: Training) -> None:
    busy_gpu = DeviceReading("GPU-1", "cuda", "a GPU", 100, 90, 1.0, (ForeignProcess(1, None),))
    training.script = [(0.0, Readings((IDLE_CPU, busy_gpu)))]

    async def scene() -> None:
        await training.wait_until(lambda: training.running)
        start_s = training.clock.seconds
        await training.wait_until(lambda: training.clock.seconds >= start_s + 3 * LIMITS.busy_s)

    assert training.play(scene) == "cpu"
    assert training.runs == 1


def test_a_lost_lease_stops_it_at_once(training: Training) -> None:
    async def scene() -> None:
        await training.wait_until(lambda: training.running)
        with write_session(training.store) as session:
            release(session, "cpu", "me")
        await training.wait_until(lambda: training.stopped == 1)
        assert not training.pause.exists()

    training.play(scene)


async def test_errors_of_the_work_are_raised(training: Training) -> None:
    async def fails(devices: tuple[DeviceReading, ...]) -> str:
        raise KeyError(devices[0].id)

    async def run_scene() -> None:
        task = asyncio.create_task(run_on_device(training.access(), training.pause, fails, training.reports.append))
        await training.wait_until(task.done)
        await task

    with pytest.raises(KeyError):
        await asyncio.wait_for(run_scene(), 60)
    assert training.holders() == []


@pytest.mark.parametrize("deaf", [False, True])
async def test_a_drain_waits_for_the_checkpoint_and_a_second_one_does_not(training: Training, deaf: bool) -> None:
    training.deaf = deaf

    async def main() -> None:
        task = asyncio.create_task(
            run_on_device(training.access(), training.pause, training.work, training.reports.append)
        )
        await training.wait_until(lambda: training.running)
        task.cancel()
        await training.wait_until(training.pause.exists)
        if deaf:
            assert not task.done()
            task.cancel()
        await training.wait_until(task.done)
        assert task.cancelled()

    await asyncio.wait_for(main(), 60)
    assert (training.done, training.stopped) == ((0, 1) if deaf else (1, 0))
    assert training.holders() == []


async def test_a_drain_while_it_gives_way_waits_for_the_same_checkpoint(training: Training) -> None:
    training.deaf = True

    async def main() -> None:
        task = asyncio.create_task(
            run_on_device(training.access(), training.pause, training.work, training.reports.append)
        )
        await training.wait_until(lambda: training.running)
        training.ask_back()
        await training.wait_until(training.pause.exists)
        task.cancel()
        for _ in range(20):  # let it be cut short, if it is
            await asyncio.sleep(0)
        training.deaf = False
        await training.wait_until(task.done)
        assert task.cancelled()

    await asyncio.wait_for(main(), 60)
    assert (training.done, training.stopped) == (1, 0)
    assert training.holders() == []


GPU = DeviceReading("GPU-1", "cuda", "a GPU", 80 * 2**30, 2**30, 0.0)


@pytest.mark.parametrize(("after_gib", "remainder_mib"), [(2, 0), (9, 8192)])
def test_memory_that_does_not_come_back_is_an_event_with_the_figure(
    training: Training, caplog: pytest.LogCaptureFixture, after_gib: int, remainder_mib: int
) -> None:
    caplog.set_level("INFO")
    training.limits = replace(LIMITS, train_on="cuda", cuda=Thresholds(0.1, 0.2))
    during = replace(GPU, memory_used=60 * 2**30, memory_own=58 * 2**30, utilisation=1.0)
    at_80_s = replace(during, memory_used=50 * 2**30, memory_own=48 * 2**30)
    reading_at_end = replace(GPU, memory_used=after_gib * 2**30)
    # The driver frees the memory two seconds after the end of the training.
    states = [(0, GPU), (30, during), (80, at_80_s), (100, replace(at_80_s, memory_own=0)), (103, reading_at_end)]
    training.script = [(at, Readings((state,))) for at, state in states]

    async def scene() -> None:
        await training.wait_until(lambda: training.clock.seconds >= 101)

    assert training.play(scene) == "GPU-1"
    figures = (
        f"GPU-1: 1024 MiB in use before the training, at most 61440 MiB during it, {after_gib * 1024} MiB after it"
    )
    assert figures in caplog.text
    with read_session(training.store) as session:
        event = last_event(session, MEMORY_EVENT)
    if not remainder_mib:
        assert event is None
    else:
        assert event is not None
        assert event.detail["warning"] == f"{figures}; {remainder_mib} MiB did not come back"
        assert "WARNING" in caplog.text
