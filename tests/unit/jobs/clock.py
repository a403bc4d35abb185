"""A clock that a test moves by hand; wall and monotonic time can part."""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from traced.jobs.leases import Clocks

T0 = datetime(2026, 3, 14, 9, 0, tzinfo=UTC)


class ManualClock:
    """Stands still until ``tick``; ``step`` moves the wall's clock alone."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.offset = timedelta(0)
        self.sleeps = 0  # begun so far
        self._sleepers: list[tuple[float, asyncio.Event]] = []
        self._sleep_started = asyncio.Event()

    @property
    def clocks(self) -> Clocks:
        return Clocks(self.now, lambda: self.seconds, self.sleep)

    def now(self) -> datetime:
        return T0 + timedelta(seconds=self.seconds) + self.offset

    def step(self, seconds: float) -> None:
        self.offset += timedelta(seconds=seconds)

    async def sleep(self, seconds: float) -> None:
        sleeper = (self.seconds + seconds, asyncio.Event())
        self._sleepers.append(sleeper)
        self.sleeps += 1
        self._sleep_started.set()
        try:
            await sleeper[1].wait()
        finally:
            self._sleepers.remove(sleeper)

    def tick(self, seconds: float) -> int:
        """Let time pass and wake whoever is due; how many were."""
        self.seconds += seconds
        woken = [event for due_s, event in self._sleepers if due_s <= self.seconds and not event.is_set()]
        for event in woken:
            event.set()
        return len(woken)

    async def settle(self, sleeps: int, at_most_s: float = 0.25) -> None:
        """Wait until so many sleeps have begun and somebody sleeps, for at most ``at_most_s`` real seconds: tasks end.

        A clock that moves on while a thread is in the store would run past the moments that a test looks for.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wait_for_sleepers(sleeps), at_most_s)

    async def _wait_for_sleepers(self, sleeps: int) -> None:
        await self.wait_for_sleeps(sleeps)
        while all(event.is_set() for _, event in self._sleepers):
            await self.wait_for_sleeps(self.sleeps + 1)

    async def advance(self, seconds: float) -> None:
        """Let time pass until as many sleep again as were woken by it."""
        start_count = self.sleeps
        await self.wait_for_sleeps(start_count + self.tick(seconds))

    async def wait_for_sleeps(self, sleeps: int) -> None:
        """Wait until so many sleeps have begun."""
        while self.sleeps < sleeps:
            self._sleep_started.clear()
            await self._sleep_started.wait()
