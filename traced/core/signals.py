"""How a daemon is told to stop or to reload: signals as a small state machine for asyncio.

    running ──stop──▶ draining ──stop, or drain_seconds later──▶ forced

What runs beside the work (``beside``) has no end of its own: the first of it that fails begins the draining.

Invariants: phases only go forward; the events are set exactly when their phase is reached (``forced`` implies
``draining``); a reload asked for twice before anyone looks is one reload, and none is taken once draining began.
SIGTERM and SIGINT stop, SIGHUP reloads; the handlers found before are put back at the end.

A call on a thread that does not return (a database or an engine that hangs) holds the end up for ``last_seconds`` at
most behind the forced one: the process then ends without it (``os._exit``), which costs no more than a kill does.

Not covered: a loop that is stuck in a call: asyncio runs these handlers between two steps of the loop, so it is the
service manager's watchdog and its SIGKILL that end such a process.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from typing import Any

log = logging.getLogger(__name__)

EX_SOFTWARE = 70  # sysexits.h
STOPPING = (signal.SIGTERM, signal.SIGINT)


class Phase(StrEnum):
    """Where a lifecycle stands."""

    RUNNING = "running"
    DRAINING = "draining"
    FORCED = "forced"


class Lifecycle:
    """Made inside a running loop; ``draining``, ``forced`` and ``reload`` are what the daemon's tasks wait for.

    Once forced, or ready to be, the process has ``last_seconds`` to end in order; None gives it all the time.
    """

    def __init__(self, drain_seconds: float, last_seconds: float | None = None) -> None:
        self.drain_seconds = drain_seconds
        self.last_seconds = last_seconds
        self.draining = asyncio.Event()
        self.forced = asyncio.Event()
        self.reload = asyncio.Event()  # whoever reloads clears it first
        self.cause = ""
        self._loop = asyncio.get_running_loop()
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def phase(self) -> Phase:
        """Where it stands now."""
        if self.forced.is_set():
            return Phase.FORCED
        return Phase.DRAINING if self.draining.is_set() else Phase.RUNNING

    @property
    def seconds_left(self) -> float:
        """Seconds until draining is cut short; ``drain_seconds`` while running, 0 once forced."""
        if self._deadline is None:
            return self.drain_seconds
        return 0.0 if self.forced.is_set() else max(0.0, self._deadline.when() - self._loop.time())

    def stop(self, cause: str) -> None:
        """Go one phase on: the first call begins to drain, the second forces; ``cause`` of the last step is kept."""
        if self.forced.is_set():
            return
        self.cause = cause
        if self.draining.is_set():
            self._force(cause)
            return
        self._deadline = self._loop.call_later(self.drain_seconds, self._force, f"{self.drain_seconds:g} s to drain")
        self._end_within(self.drain_seconds)
        self.reload.clear()
        self.draining.set()

    def ask_reload(self) -> None:
        """Ask for a reload, unless it is being stopped."""
        if not self.draining.is_set():
            self.reload.set()

    def close(self) -> None:
        """Forget the deadline: the work is done."""
        if self._deadline is not None:
            self._deadline.cancel()

    def _force(self, cause: str) -> None:
        self.cause = cause
        self.close()
        self.forced.set()
        self._end_within(0.0)

    def _end_within(self, seconds: float) -> None:
        """Let the process live for so long and ``last_seconds``, whatever happens."""
        if self.last_seconds is not None:
            last = threading.Timer(seconds + self.last_seconds, _end)
            last.daemon = True
            last.start()


def _end() -> None:
    log.critical("a call under way has not returned in time: the process ends without it")
    os._exit(EX_SOFTWARE)


@contextmanager
def signals(lifecycle: Lifecycle) -> Iterator[None]:
    """Let SIGTERM, SIGINT and SIGHUP drive ``lifecycle`` during the body (main thread only, as asyncio has it).

    Enter it after anything that sets signal handlers of its own (uvicorn's ``Server.serve`` does).
    """
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (*STOPPING, signal.SIGHUP)}
    for number in STOPPING:
        loop.add_signal_handler(number, lifecycle.stop, number.name)
    loop.add_signal_handler(signal.SIGHUP, lifecycle.ask_reload)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        lifecycle.close()


async def until_forced(work: Coroutine[Any, Any, None], lifecycle: Lifecycle) -> bool:
    """Run ``work`` to its end, or cancel it once forced and wait for its ``finally`` parts; True: it ended by itself.

    ``work`` watches ``lifecycle.draining`` and returns at its next safe point. What it raises is raised here.
    """
    task = asyncio.ensure_future(work)
    force = asyncio.ensure_future(lifecycle.forced.wait())
    try:
        await asyncio.wait({task, force}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        force.cancel()
        cut_short = not task.done()
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled() or not cut_short:
        task.result()
    return not cut_short


def cancel_once(work: "asyncio.Task[Any]") -> None:
    """Ask it to stop at its next safe point; a second asking would not wait for that."""
    if not work.cancelling():
        work.cancel()


@asynccontextmanager
async def beside(lifecycle: Lifecycle, **work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run each ``work``, by its name, during the body, and cancel it at the end.

    One that fails begins the draining, and its error is raised after the body: whoever restarts services is to know.
    """

    def look(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("the %s failed", task.get_name(), exc_info=error)
            if lifecycle.phase is Phase.RUNNING:
                lifecycle.stop(f"the {task.get_name()} failed")

    tasks = [asyncio.create_task(one, name=name) for name, one in work.items()]
    for task in tasks:
        task.add_done_callback(look)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
