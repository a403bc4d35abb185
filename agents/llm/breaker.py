"""A circuit breaker: a server that failed many times in a row, whoever asked, is left alone for a while.

Invariants: it opens after ``FAILURES`` failures in a row over all callers; while it is open nobody asks, but after a
pause one caller does, and only that one; its success closes it, its failure lengthens the pause (to ``LONGEST_S`` at
most). A probe that is given up, neither answered nor failed, leaves the place to the next. How it fails: ``Open``, for
a caller whose patience ends before the pause does.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agents.llm.pace import Clock, Sleep

FAILURES = 8
PAUSE_S = 15.0
LONGEST_S = 120.0


class Open(Exception):
    """The server is left alone, and for longer than the caller has patience."""


class Breaker:
    """Lets requests pass, one at a time where a server has failed too often."""

    def __init__(self, clock: Clock, sleep: Sleep) -> None:
        self._clock, self._sleep = clock, sleep
        self._failures = 0
        self._last = ""
        self._pause = 0.0  # 0 while closed
        self._until = 0.0
        self._probe: asyncio.Event | None = None

    @asynccontextmanager
    async def passed(
        self, deadline: float, *, failed: type[Exception], answered: tuple[type[Exception], ...]
    ) -> AsyncIterator[None]:
        """Run the body when asking is allowed. Raises ``Open``.

        An exception ``failed`` is a failure of the server, one of ``answered`` an answer of it; any other, a defect of
        ours say, tells nothing of the server.
        """
        probe = await self._enter(deadline)
        try:
            yield
        except failed as error:
            self._failed(str(error), probing=probe is not None)
            raise
        except answered:
            self._close()
            raise
        else:
            self._close()
        finally:
            if probe is not None:
                self._probe = None
                probe.set()

    async def _enter(self, deadline: float) -> asyncio.Event | None:
        """Wait until asking is allowed; returns the probe that the caller is, None where it is one of many."""
        while self._pause:
            if self._probe is not None:
                await self._probe.wait()
                continue
            now = self._clock()
            if now >= self._until:
                self._probe = asyncio.Event()
                return self._probe
            if self._until > deadline:
                raise Open(
                    f"it failed {self._failures} times in a row and is left alone for {self._until - now:.0f} s more, "
                    f"then one request will try it; the last failure: {self._last}"
                )
            await self._sleep(self._until - now)
        return None

    def _failed(self, said: str, *, probing: bool) -> None:
        self._failures += 1
        self._last = said
        if probing or (not self._pause and self._failures >= FAILURES):
            self._pause = min(LONGEST_S, 2 * self._pause or PAUSE_S)
            self._until = self._clock() + self._pause

    def _close(self) -> None:
        self._failures, self._pause = 0, 0.0
