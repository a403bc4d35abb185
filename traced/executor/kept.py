"""A child that is started again whenever it dies.

Invariants: between two starts there is a pause, longer each time, and short again once it has lived for ``GOOD_S``,
to which the time of its start does not count; what cannot be started is tried again. Not covered: what hangs and does
not die.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from traced.errors import TracedError

log = logging.getLogger(__name__)
LOOK_S = 0.2
GOOD_S = 60.0
PAUSES_S = (1.0, 2.0, 5.0, 15.0, 60.0)


class Running(Protocol):
    """A child process."""

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        ...

    def stop(self) -> None:
        """End it."""
        ...


class Kept:
    """One such child; ``begin`` starts it and returns when it is ready."""

    def __init__(self, name: str, begin: Callable[[], Running]) -> None:
        self._name, self._begin = name, begin
        self._running: Running | None = None
        self._over = False

    async def start(self) -> None:
        """Start it; raises what ``begin`` raises."""
        self._running = await asyncio.to_thread(self._begin)
        if self._over:  # it became ready as everything ended
            self._running.stop()

    async def keep(self) -> None:
        """Start it again whenever it dies, until cancelled."""
        failures = 0
        began: float | None = time.monotonic()  # when it became ready; None: it did not
        while True:
            await asyncio.sleep(LOOK_S)
            if self._running is not None and self._running.alive:
                continue
            if began is not None and time.monotonic() - began > GOOD_S:
                failures = 0
            pause = PAUSES_S[min(failures, len(PAUSES_S) - 1)]
            log.warning("%s ended; started again in %.0f s", self._name, pause)
            await asyncio.sleep(pause)
            failures, began = failures + 1, None
            try:
                await asyncio.to_thread(self._end)
                await self.start()
                began = time.monotonic()
            except (TracedError, OSError) as error:
                log.warning("%s cannot be started: %s", self._name, error)

    def stop(self) -> None:
        """End it for good."""
        self._over = True
        self._end()

    def _end(self) -> None:
        if self._running is not None:
            self._running.stop()
