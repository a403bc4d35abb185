"""A clock that advances only by sleeping; sleeping takes no real time."""

import asyncio
from dataclasses import dataclass, field


@dataclass
class VirtualTime:
    """A virtual clock; ``slept`` lists the durations of all sleeps in order."""

    now: float = 1000.0
    slept: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        wake_at = self.now + seconds
        await asyncio.sleep(0)
        self.now = max(self.now, wake_at)
