"""A child that is kept running: the pauses between its starts, and its end."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.waiting import eventually_async
from traced.core.errors import TracedError
from traced.processes import child_process
from traced.processes.child_process import RESET_UPTIME_S, RestartingProcess

LONG_S = RESET_UPTIME_S + 1
PAUSES_S = (0.001, 0.002, 0.003)


@dataclass
class Clock:
    """Stands still but for what the child does."""

    at: float = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.at


@dataclass
class Child:
    """Lives so long and is then found dead."""

    clock: Clock
    life_s: float
    is_stopped: bool = False

    @property
    def alive(self) -> bool:
        """Not any more."""
        self.clock.at += self.life_s
        self.life_s = 0.0
        return False

    def stop(self) -> None:
        """It has ended already."""
        self.is_stopped = True


def pauses(
    lives: Sequence[float | None], start_s: float, patched: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> list[float]:
    """The pause before each start but the first; a life of None is a start that fails."""
    clock, left, finished = Clock(), list(lives), asyncio.Event()
    patched.setattr(child_process, "time", clock)
    patched.setattr(child_process, "BACKOFF_S", PAUSES_S)
    patched.setattr(child_process, "POLL_S", 0.0)

    async def check() -> None:
        loop = asyncio.get_running_loop()

        def begin() -> Child:
            clock.at += start_s
            life_s = left.pop(0) if left else 0.0
            if not left:
                loop.call_soon_threadsafe(finished.set)
            if life_s is None:
                raise TracedError("not ready in time")
            return Child(clock, life_s)

        child = RestartingProcess("the child", begin)
        await child.start()
        keeping = asyncio.create_task(child.supervise())
        await finished.wait()
        keeping.cancel()

    asyncio.run(check())
    arguments = [record.args for record in caplog.records if "restarting in" in record.msg]
    return [args[1] for args in arguments if isinstance(args, tuple) and isinstance(args[1], float)][: len(lives) - 1]


def test_slowly_failing_starts_are_backed_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert pauses([0.0, None, None, None], LONG_S, monkeypatch, caplog) == [0.001, 0.002, 0.003]


def test_start_up_time_is_not_uptime(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert pauses([0.0, 1.0, 1.0, 1.0], LONG_S, monkeypatch, caplog) == [0.001, 0.002, 0.003]


def test_a_long_uptime_resets_the_back_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert pauses([0.0, 0.0, LONG_S, None, 0.0], 1.0, monkeypatch, caplog) == [0.001, 0.002, 0.001, 0.002]


async def test_a_process_that_starts_while_its_supervision_ends_is_stopped() -> None:
    is_starting, may_go_on = threading.Event(), threading.Event()
    started: list[Child] = []

    def begin() -> Child:
        started.append(Child(Clock(), LONG_S))
        is_starting.set()
        may_go_on.wait(LONG_S)
        return started[-1]

    process = RestartingProcess("the child", begin)
    starting = asyncio.create_task(process.start())
    await asyncio.to_thread(is_starting.wait, LONG_S)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    process.stop()
    assert not started[0].is_stopped
    may_go_on.set()
    await eventually_async(lambda: started[0].is_stopped)
