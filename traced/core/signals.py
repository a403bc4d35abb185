"""Stop and reload signals of a daemon, as a small state machine for asyncio.

    running ──stop──▶ draining ──stop, or drain_seconds later──▶ forced

SIGTERM and SIGINT stop, SIGHUP reloads. Phases only move forward, and each event is set exactly when its phase is
reached; two reload requests before the first is handled count as one, and none is accepted while draining. Not
covered: a blocked event loop, which cannot run these handlers; the watchdog of the service manager ends such a
process.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum

log = logging.getLogger(__name__)

EX_SOFTWARE = 70  # sysexits.h
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Phase(StrEnum):
    """The phase of a lifecycle."""

    RUNNING = "running"
    DRAINING = "draining"
    FORCED_STOP = "forced"


class Lifecycle:
    """The events that the tasks of a daemon wait for: ``draining``, ``forced_stop`` and ``reload``.

    Must be created inside a running loop. After the deadline for draining the process has ``last_seconds`` to end, then
    it exits (None: no limit).
    """

    def __init__(self, drain_seconds: float, last_seconds: float | None = None) -> None:
        self.drain_seconds = drain_seconds
        self.last_seconds = last_seconds
        self.draining = asyncio.Event()
        self.forced_stop = asyncio.Event()
        # The task that reloads clears it first, so that a request during the reload is not lost.
        self.reload = asyncio.Event()
        self.cause = ""
        self._loop = asyncio.get_running_loop()
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def phase(self) -> Phase:
        """The current phase."""
        if self.forced_stop.is_set():
            return Phase.FORCED_STOP
        return Phase.DRAINING if self.draining.is_set() else Phase.RUNNING

    @property
    def seconds_left(self) -> float:
        """Seconds until the forced stop; ``drain_seconds`` while running, 0 once forced."""
        if self._deadline is None:
            return self.drain_seconds
        return 0.0 if self.forced_stop.is_set() else max(0.0, self._deadline.when() - self._loop.time())

    def stop(self, cause: str) -> None:
        """Move to the next phase: the first call starts draining, the second forces the stop."""
        if self.forced_stop.is_set():
            return
        self.cause = cause
        if self.draining.is_set():
            self._force(cause)
            return
        self._deadline = self._loop.call_later(self.drain_seconds, self._force, f"{self.drain_seconds:g} s to drain")
        self._end_within(self.drain_seconds)
        self.reload.clear()
        self.draining.set()

    def request_reload(self) -> None:
        """Request a reload; ignored while draining."""
        if not self.draining.is_set():
            self.reload.set()

    def close(self) -> None:
        """Cancel the deadline, because the work is done."""
        if self._deadline is not None:
            self._deadline.cancel()

    def _force(self, cause: str) -> None:
        self.cause = cause
        self.close()
        self.forced_stop.set()
        self._end_within(0.0)

    def _end_within(self, seconds: float) -> None:
        """Exit the process after ``seconds`` plus ``last_seconds``, whatever happens."""
        # A thread that does not return (a hung database or engine) would block the end of the process for ever.
        if self.last_seconds is not None:
            timer = threading.Timer(seconds + self.last_seconds, _exit_process)
            timer.daemon = True
            timer.start()


def _exit_process() -> None:
    log.critical("a background call did not return in time; the process exits without waiting for it")
    os._exit(EX_SOFTWARE)


@contextmanager
def signals(lifecycle: Lifecycle) -> Iterator[None]:
    """Handle SIGTERM, SIGINT and SIGHUP with ``lifecycle`` during the block, then restore the previous handlers.

    Main thread only. Enter it after anything that sets its own signal handlers (such as uvicorn's ``Server.serve``).
    """
    loop = asyncio.get_running_loop()
    previous_handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGHUP)}
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, lifecycle.stop, number.name)
    loop.add_signal_handler(signal.SIGHUP, lifecycle.request_reload)
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        lifecycle.close()


async def run_until_forced(work: Coroutine[object, object, None], lifecycle: Lifecycle) -> bool:
    """Run ``work`` to its end, or cancel it on a forced stop and wait for its cleanup.

    ``work`` watches ``lifecycle.draining`` and returns at its next safe point. Its exceptions are raised here.

    Returns:
        Whether it ended without being cancelled.
    """
    task = asyncio.ensure_future(work)
    force = asyncio.ensure_future(lifecycle.forced_stop.wait())
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


def cancel_once(work: "asyncio.Task[object]") -> None:
    """Cancel a task that has not been cancelled yet."""
    # The first cancellation waits for the next safe point; a second one would interrupt that.
    if not work.cancelling():
        work.cancel()


@asynccontextmanager
async def background_tasks(lifecycle: Lifecycle, **work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run each ``work`` as a task of its name during the block, and cancel it at the end.

    A task that fails starts draining, and its exception is raised after the block, so that the service manager sees it.
    """

    def on_done(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("the %s failed", task.get_name(), exc_info=error)
            if lifecycle.phase is Phase.RUNNING:
                lifecycle.stop(f"the {task.get_name()} failed")

    tasks = [asyncio.create_task(coroutine, name=name) for name, coroutine in work.items()]
    for task in tasks:
        task.add_done_callback(on_done)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
