"""Holding a device: on a real SQLite file, with a clock moved by hand."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from store.database import open_store, sqlite_url, write_session
from store.errors import StoreUnavailable
from store.repositories.leases import Lease, acquire, get_lease, heartbeat, list_leases, release, request_return
from tests.unit.jobs.clock import ManualClock
from traced.core.time_windows import parse_windows
from traced.jobs.devices import DeviceReading, Readings, ScriptedProbe
from traced.jobs.idleness import Rules, Thresholds
from traced.jobs.leases import DeviceLease, LeaseRequest, device_lease

IDLE_CPU = DeviceReading("cpu", "cpu", "a CPU", 100, 10, 0.0)
BUSY = replace(IDLE_CPU, utilisation=0.9)
GPU = DeviceReading("GPU-1", "cuda", "a GPU", 100, 0, 0.0)
LIMITS = Rules(Thresholds(0.25, 0.8), Thresholds(0.1, 0.1), idle_s=20, poll_s=5, train_on="cpu")
TTL = timedelta(seconds=40)
REQUEST = LeaseRequest("me", "train", None, TTL)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    session = open_store(sqlite_url(tmp_path / "traced.db"))
    yield session
    session.dispose()


@dataclass
class Use:
    """A task that holds a device until ``finish`` is set."""

    engine: Engine
    clock: ManualClock
    script: list[tuple[float, Readings]] = field(default_factory=lambda: [(0, Readings((IDLE_CPU,)))])
    limits: Rules = LIMITS
    request: LeaseRequest = REQUEST
    waits: list[Mapping[str, str]] = field(default_factory=list)
    lease: DeviceLease | None = None
    finish: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> str:
        probe = ScriptedProbe(self.script, lambda: self.clock.seconds)
        context = device_lease(
            self.engine, probe, lambda: self.limits, self.request, self.clock.clocks, on_wait=self.waits.append
        )
        async with context as self.lease:
            await self.finish.wait()
        return self.lease.reason

    async def start(self) -> "asyncio.Task[str]":
        """Begin, and go on until the first look is over."""
        task = asyncio.create_task(self.run())
        await self.clock.wait_for_sleeps(1)
        return task

    async def until_held(self, at_most: float = 300) -> DeviceLease:
        """Let time pass, look by look, until the device is held."""
        while self.lease is None and self.clock.seconds < at_most:
            await self.clock.advance(self.limits.poll_s)
        assert self.lease is not None, self.waits[-1]
        return self.lease


def lease(engine: Engine) -> Lease | None:
    with write_session(engine) as session:
        return get_lease(session, "cpu")


def take(engine: Engine, holder: str, clock: ManualClock, ttl: timedelta = TTL) -> None:
    with write_session(engine) as session:
        assert acquire(session, "cpu", holder, "serve", None, at=clock.now(), ttl=ttl) is not None


def rename(engine: Engine, table: str, name: str) -> None:
    """How a store that fails is made, and mended."""
    with write_session(engine) as session:
        session.execute(text(f"ALTER TABLE {table} RENAME TO {name}"))


def play(scene: Callable[[ManualClock], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(240):
            await scene(ManualClock())

    asyncio.run(main())


def test_a_device_is_held_once_it_was_idle_for_long_enough_and_given_back(engine: Engine) -> None:
    async def scene(clock: ManualClock) -> None:
        use = Use(engine, clock, [(0, Readings((IDLE_CPU,))), (10, Readings((BUSY,))), (20, Readings((IDLE_CPU,)))])
        task = await use.start()
        device_lease = await use.until_held()
        assert clock.seconds == 40  # quiet since 20, idle_s 20
        assert device_lease.leases == (Lease("cpu", "me", "train", None, clock.now(), clock.now(), clock.now() + TTL),)
        assert lease(engine) == device_lease.leases[0]
        assert [waits["cpu"] for waits in use.waits] == [
            "idle for 0 of 20 s",
            "idle for 5 of 20 s",
            "utilisation 90% is over 25%",
            "utilisation 90% is over 25%",
            "idle for 0 of 20 s",
            "idle for 5 of 20 s",
            "idle for 10 of 20 s",
            "idle for 15 of 20 s",
        ]
        use.finish.set()
        assert await task == ""
        assert lease(engine) is None

    play(scene)


def test_heartbeats_keep_the_lease_from_others(engine: Engine) -> None:
    async def scene(clock: ManualClock) -> None:
        use = Use(engine, clock)
        task = await use.start()
        await use.until_held()
        for _ in range(20):
            await clock.advance(5)
            with write_session(engine) as session:
                assert acquire(session, "cpu", "b", "train", None, at=clock.now(), ttl=TTL) is None
            assert lease(engine).heartbeat_at == clock.now()  # type: ignore[union-attr]
        use.finish.set()
        assert await task == ""

    play(scene)


def test_outside_its_hours_nothing_begins(engine: Engine) -> None:
    async def scene(clock: ManualClock) -> None:
        use = Use(engine, clock, limits=replace(LIMITS, quiet_windows=parse_windows("08:00-09:02")))  # it is 09:00 UTC
        task = await use.start()
        await use.until_held()
        assert clock.seconds == 120
        assert "in the quiet hours 08:00-09:02" in use.waits[-1]["cpu"]
        use.finish.set()
        await task

    play(scene)


def test_a_preemption_is_noticed_with_the_next_heartbeat(engine: Engine) -> None:
    async def scene(clock: ManualClock) -> None:
        use = Use(engine, clock)
        task = await use.start()
        device_lease = await use.until_held()
        with write_session(engine) as session:
            request_return(session, "cpu", "serving", clock.now())
        assert not device_lease.preempted.is_set()
        await clock.advance(5)
        assert device_lease.preempted.is_set()
        use.finish.set()
        assert await task == "serving requested it back"
        assert lease(engine) is None

    play(scene)


def test_a_lease_taken_over_by_another_is_reported_and_not_released(engine: Engine) -> None:
    async def scene(clock: ManualClock) -> None:
        use = Use(engine, clock)
        task = await use.start()
        device_lease = await use.until_held()
        with write_session(engine) as session:
            release(session, "cpu", "me")
        take(engine, "b", clock)
        clock.tick(5)
        await device_lease.preempted.wait()
        assert "is lost: 'b' has it now" in device_lease.reason
        use.finish.set()
        await task
        assert lease(engine).holder == "b"  # type: ignore[union-attr]

    play(scene)


def test_short_store_failures_keep_the_lease(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(clock: ManualClock) -> None:
        use = Use(engine, clock)
        task = await use.start()
        lease = await use.until_held()
        rename(engine, "leases", "gone")
        for _ in range(4):
            await clock.advance(5)
        assert not lease.preempted.is_set()
        rename(engine, "gone", "leases")
        for _ in range(5):
            await clock.advance(5)
        assert not lease.preempted.is_set()
        use.finish.set()
        assert await task == ""

    with caplog.at_level(logging.WARNING):
        play(scene)
    assert len([record for record in caplog.records if "the heartbeat of" in record.message]) == 4


def test_long_store_failures_lapse_the_lease(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(clock: ManualClock) -> None:
        use = Use(engine, clock)
        task = await use.start()
        lease = await use.until_held()
        rename(engine, "leases", "gone")
        for _ in range(5):
            await clock.advance(5)
        clock.tick(5)  # 30 s: three quarters of the time to live, so before anybody may take it over
        await lease.preempted.wait()
        use.finish.set()
        assert await task == "no heartbeat was stored for 30 s"

    with caplog.at_level(logging.WARNING):
        play(scene)
    assert "could not be returned, it expires" in caplog.records[-1].message
    rename(engine, "gone", "leases")
    assert lease(engine).holder == "me"  # type: ignore[union-attr]


def test_an_error_of_the_body_is_raised_and_the_device_released(engine: Engine) -> None:
    async def scene(clock: ManualClock) -> None:
        probe = ScriptedProbe([(0, Readings((IDLE_CPU,)))], lambda: clock.seconds)
        limits = replace(LIMITS, idle_s=0)

        async def body() -> None:
            async with device_lease(engine, probe, lambda: limits, REQUEST, clock.clocks, on_wait=print):
                assert lease(engine) is not None
                raise KeyError("the body's own")

        with pytest.raises(KeyError, match="the body's own"):
            await body()
        assert lease(engine) is None

    play(scene)


def test_a_cancelled_body_gives_the_device_back(engine: Engine) -> None:
    async def scene(clock: ManualClock) -> None:
        use = Use(engine, clock)
        task = await use.start()
        await use.until_held()
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert lease(engine) is None

    play(scene)


def test_a_wait_cancelled_while_it_asks_leaves_no_lease(engine: Engine) -> None:
    async def scene(clock: ManualClock) -> None:
        loop, acquiring, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def now() -> datetime:
            if threading.current_thread() is not threading.main_thread():  # in the midst of asking the store
                loop.call_soon_threadsafe(acquiring.set)
                assert go_on.wait(200)
            return clock.now()

        async def hold() -> None:
            probe = ScriptedProbe([(0, Readings((IDLE_CPU,)))], lambda: clock.seconds)
            clocks = replace(clock.clocks, now=now)
            async with device_lease(engine, probe, lambda: replace(LIMITS, idle_s=0), REQUEST, clocks, on_wait=print):
                raise AssertionError("the body began although it was cancelled")

        task = asyncio.create_task(hold())
        await acquiring.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await loop.shutdown_default_executor()  # whatever a thread was at has happened
        assert lease(engine) is None

    play(scene)


def test_a_step_forward_takes_no_device_from_a_live_holder_but_a_dead_one_loses_it(engine: Engine) -> None:
    async def scene(clock: ManualClock) -> None:
        take(engine, "other", clock)
        use = Use(engine, clock)
        task = await use.start()
        for _ in range(4):
            await clock.advance(5)
        clock.step(86_400)  # every lease has lapsed by the clock on the wall
        for _ in range(20):
            await clock.advance(5)
            assert use.lease is None
            assert use.waits[-1]["cpu"] == "leased to other since 2026-03-14 09:00:00 UTC for serve"
            with write_session(engine) as session:
                heartbeat(session, "cpu", "other", clock.now())
            clock.step(86_400)
        died = clock.seconds
        await use.until_held()
        assert 40 <= clock.seconds - died <= 45  # its whole time to live, seen by the monotonic clock
        use.finish.set()
        await task

    play(scene)


def test_a_step_back_does_not_keep_a_dead_holders_lease(engine: Engine) -> None:
    async def scene(clock: ManualClock) -> None:
        take(engine, "dead", clock)
        clock.step(-86_400)
        use = Use(engine, clock)
        task = await use.start()
        await use.until_held()
        assert clock.seconds <= 20 + 2 * 40
        use.finish.set()
        await task

    play(scene)


def test_a_released_device_is_taken_at_the_next_poll(engine: Engine) -> None:
    async def scene(clock: ManualClock) -> None:
        take(engine, "other", clock, timedelta(days=1))
        use = Use(engine, clock)
        task = await use.start()
        for _ in range(10):
            await clock.advance(5)
        with write_session(engine) as session:
            release(session, "cpu", "other")
        await use.until_held()
        assert clock.seconds == 55
        use.finish.set()
        await task

    play(scene)


def test_two_waiters_get_a_device_one_after_the_other(engine: Engine) -> None:
    async def scene(clock: ManualClock) -> None:
        uses = [Use(engine, clock, request=replace(REQUEST, holder=name)) for name in "ab"]
        tasks = [asyncio.create_task(use.run()) for use in uses]
        await clock.wait_for_sleeps(2)
        for _ in range(4):
            await clock.advance(5)
        await clock.wait_for_sleeps(
            11
        )  # two for each of the first four looks, then the winner's two and the other's one
        [first] = [use for use in uses if use.lease is not None]
        [second] = [use for use in uses if use.lease is None]
        assert f"leased to {first.request.holder}" in second.waits[-1]["cpu"]
        first.finish.set()
        await tasks[uses.index(first)]
        await second.until_held()
        second.finish.set()
        await tasks[uses.index(second)]
        with write_session(engine) as session:
            assert list_leases(session) == []

    play(scene)


def test_gpus_are_preferred_and_a_missing_device_is_waited_for(engine: Engine) -> None:
    async def scene(clock: ManualClock) -> None:
        script = [(0.0, Readings((IDLE_CPU,), ("no GPU can be read",))), (10.0, Readings((IDLE_CPU, GPU)))]
        use = Use(engine, clock, script, limits=replace(LIMITS, train_on="cuda"))
        task = await use.start()
        lease = await use.until_held()
        assert [*use.waits[0]] == [""]
        assert "no GPU can be read" in use.waits[0][""]
        assert (clock.seconds, lease.devices, lease.leases[0].device) == (30, (GPU,), "GPU-1")
        use.finish.set()
        await task

    play(scene)


def test_store_errors_while_waiting_are_raised(engine: Engine) -> None:
    async def scene(clock: ManualClock) -> None:
        rename(engine, "leases", "gone")
        probe = ScriptedProbe([(0, Readings((IDLE_CPU,)))], lambda: clock.seconds)
        with pytest.raises(StoreUnavailable, match="no such table: leases"):
            async with device_lease(
                engine, probe, lambda: replace(LIMITS, idle_s=0), REQUEST, clock.clocks, on_wait=print
            ):
                pass

    play(scene)


async def test_several_gpus_are_leased_at_once_or_not_at_all(engine: Engine) -> None:
    gpus = tuple(replace(GPU, id=f"GPU-{number}") for number in range(3))
    limits = replace(LIMITS, train_on="cuda", idle_s=0)

    async def scene() -> None:
        clock = ManualClock()
        uses = [
            Use(engine, clock, [(0, Readings(order))], limits, replace(REQUEST, holder=name, count=2))
            for name, order in (("a", gpus), ("b", gpus[::-1]))
        ]
        tasks = [asyncio.create_task(use.run()) for use in uses]
        await clock.wait_for_sleeps(3)
        [first] = [use for use in uses if use.lease is not None]
        [second] = [use for use in uses if use.lease is None]
        with write_session(engine) as session:
            leases = list_leases(session)
        # The loser holds nothing, although one GPU is idle: otherwise two trainings could wait for each other.
        assert [lease.holder for lease in leases] == [first.request.holder] * 2
        assert sorted(second.waits[-1].values())[0] == "idle, and 2 are needed at once"
        first.finish.set()
        await tasks[uses.index(first)]
        lease = await second.until_held()
        assert len(lease.devices) == len(lease.leases) == 2
        second.finish.set()
        await tasks[uses.index(second)]
        with write_session(engine) as session:
            assert list_leases(session) == []

    await asyncio.wait_for(scene(), 60)


@pytest.mark.parametrize("requested", ["GPU-1", "GPU-2"])
async def test_the_return_of_one_gpu_revokes_the_lease_of_all(engine: Engine, requested: str) -> None:
    async def scene() -> None:
        clock = ManualClock()
        script = [(0.0, Readings((GPU, replace(GPU, id="GPU-2"))))]
        limits = replace(LIMITS, train_on="cuda", idle_s=0)
        use = Use(engine, clock, script, limits, replace(REQUEST, count=2))
        task = asyncio.create_task(use.run())
        await clock.wait_for_sleeps(2)
        assert use.lease is not None
        with write_session(engine) as session:
            assert request_return(session, requested, "serving", clock.now()) is not None
        await clock.advance(5)
        await use.lease.preempted.wait()
        use.finish.set()
        assert await task == "serving requested it back"

    await asyncio.wait_for(scene(), 60)


async def test_heartbeats_keep_the_leases_of_all_gpus(engine: Engine) -> None:
    async def scene() -> None:
        clock = ManualClock()
        script = [(0.0, Readings((GPU, replace(GPU, id="GPU-2"))))]
        use = Use(engine, clock, script, replace(LIMITS, train_on="cuda", idle_s=0), replace(REQUEST, count=2))
        task = asyncio.create_task(use.run())
        await clock.wait_for_sleeps(2)
        for _ in range(2 * int(TTL.total_seconds()) // 5):
            await clock.advance(5)
        with write_session(engine) as session:
            leases = list_leases(session)
        assert [lease.live(clock.now()) for lease in leases] == [True, True]
        use.finish.set()
        assert await task == ""

    await asyncio.wait_for(scene(), 60)


@pytest.mark.parametrize(
    ("devices", "train_on", "message"),
    [
        ((IDLE_CPU,), "cuda", "devices.train_on = 'cuda': the machine has no such device; see traced devices"),
        ((GPU,), "auto", "training.processes = 2 needs as many GPUs, and 1 can be used"),
    ],
)
async def test_a_missing_gpu_is_reported_with_the_setting(
    engine: Engine, devices: tuple[DeviceReading, ...], train_on: str, message: str
) -> None:
    clock = ManualClock()
    limits = replace(LIMITS, train_on=train_on, idle_s=0)
    use = Use(engine, clock, [(0, Readings(devices))], limits, replace(REQUEST, count=2))
    task = await use.start()
    task.cancel()
    await asyncio.wait({task})
    assert use.waits[0][""].startswith(message)
