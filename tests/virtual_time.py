"""A clock that stands still until somebody sleeps on it; sleeping takes no time."""

import asyncio
from dataclasses import dataclass, field


@dataclass
class VirtualTime:
    """``slept`` keeps what was slept for, in order."""

    now: float = 1000.0
    slept: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        until = self.now + seconds
        await asyncio.sleep(0)
        self.now = max(self.now, until)
