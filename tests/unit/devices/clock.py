"""A clock that a test moves by hand; wall and monotonic time can part."""

import asyncio
from datetime import UTC, datetime, timedelta

from traced.devices.lease import Clocks

T0 = datetime(2026, 3, 14, 9, 0, tzinfo=UTC)


class ManualClock:
    """Stands still until ``advance``; ``step`` moves the wall's clock alone."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.offset = timedelta(0)
        self._sleepers: list[tuple[float, asyncio.Event]] = []
        self._fallen_asleep = asyncio.Condition()

    @property
    def clocks(self) -> Clocks:
        return Clocks(self.now, lambda: self.seconds, self.sleep)

    def now(self) -> datetime:
        return T0 + timedelta(seconds=self.seconds) + self.offset

    def step(self, seconds: float) -> None:
        self.offset += timedelta(seconds=seconds)

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        sleeper = (self.seconds + seconds, woken)
        self._sleepers.append(sleeper)
        try:
            async with self._fallen_asleep:
                self._fallen_asleep.notify_all()
            await woken.wait()
        finally:
            self._sleepers.remove(sleeper)

    async def asleep(self, count: int) -> None:
        """Wait until ``count`` tasks sleep on this clock."""
        async with self._fallen_asleep:
            await self._fallen_asleep.wait_for(lambda: self._still_asleep() == count)

    async def advance(self, seconds: float, asleep: int) -> None:
        """Let time pass, wake whoever is due, and wait until ``asleep`` tasks sleep again."""
        self.seconds += seconds
        for due, woken in self._sleepers:
            if due <= self.seconds:
                woken.set()
        await self.asleep(asleep)

    def _still_asleep(self) -> int:
        return sum(not woken.is_set() for _, woken in self._sleepers)
