"""Turns at reading the store: however many look, and however slowly the store answers them, the work goes on.

Invariants: at most ``at_once`` have a turn at a time, each with one thread and one connection at most; who waits has
neither. Turns come in the order of asking. The control API's readings (``READINGS``) and its event streams
(``STREAMS``) together take fewer connections than the store's pool gives (15): the rest is the cycle's and the acts'.
How it fails: ``Crowded`` for who has waited ``PATIENCE_S`` for a turn; who is patient waits as long as it takes.
It belongs to one event loop. Not covered: how long a turn lasts.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from traced.service.errors import Crowded

READINGS, STREAMS = 6, 2
PATIENCE_S = 5.0


class Turns:
    """So many at once."""

    def __init__(self, at_once: int, patience_s: float = PATIENCE_S) -> None:
        self.at_once = at_once
        self.patience_s = patience_s
        self._free = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def one(self, *, patient: bool = False) -> AsyncIterator[None]:
        """A turn while the body runs. Raises ``Crowded``, unless ``patient``."""
        try:
            async with asyncio.timeout(None if patient else self.patience_s):
                await self._free.acquire()
        except TimeoutError as error:
            raise Crowded(
                f"too many look at once: no turn of {self.at_once} came free within {self.patience_s:g} s",
                hint=f"ask again in {Crowded.retry_after_s} s",
            ) from error
        try:
            yield
        finally:
            self._free.release()
