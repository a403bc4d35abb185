"""Limits the rate of requests to a language model server, and stops them while the server fails.

``RateLimiter`` bounds requests and tokens per minute, first come first served, and keeps the pause that a server asked
for. With a file, all processes of this machine share the limits and the pause. ``CircuitBreaker`` stops requests after
repeated failures and then admits one probe at a time. Clock and sleep are arguments; with a file the clock must be the
machine's monotonic clock, which all processes share. Other machines that use the same account are not coordinated: the
server answers their excess with status 429.

aiobreaker (1.2.0) is not used: its pause is fixed and measured by the wall clock, and every caller may probe at once.
"""

import asyncio
import fcntl
import json
import math
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from uuid import uuid4

MINUTE = 60.0
# Longest wait between checks: replies may turn out shorter than estimated, which frees tokens before the computed
# moment.
RECHECK_S = 1.0
# Wait between checks while another process is first in the queue.
QUEUE_POLL_S = 0.05
# A waiter that has not polled for this long is considered dead.
STALE_WAITER_S = 5.0
# A pause that another process recorded may concern another key, so it counts for at most this long.
MAX_SHARED_PAUSE_S = 600.0
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[object]]
FAILURE_THRESHOLD = 8
FIRST_OPEN_S = 15.0
MAX_OPEN_S = 120.0


class PauseTooLong(Exception):
    """The server asked for a pause that is longer than the caller's patience."""


@dataclass
class Permit:
    """The start ``at`` (by the clock) of a request, and the tokens that it used or, until its reply, may use."""

    at: float
    tokens: int
    id: str = field(default_factory=lambda: uuid4().hex)


class RateLimiter:
    """Grants permits for requests; a limit of 0 means no limit.

    Invariants: within any minute at most the allowed number of requests start, with at most the allowed tokens
    (estimated until the reply arrives), unless a single request exceeds them. The permits of a killed process expire
    after a minute, its place in the queue after ``STALE_WAITER_S``. Raises ``PauseTooLong``, and ``OSError`` if the
    file cannot be used.
    """

    def __init__(self, requests: int, tokens: int, clock: Clock, sleep: Sleep, file: Path | None = None) -> None:
        self._requests, self._tokens = requests, tokens
        self._clock, self._sleep = clock, sleep
        self._file = file
        self._permits: deque[Permit] = deque()
        # Permit id -> (queued at, last seen).
        self._waiting: dict[str, tuple[float, float]] = {}
        self._paused_until = 0.0
        self._pause_reason = ""
        self._queue = asyncio.Lock()

    async def acquire(self, tokens: int, patience: float = math.inf) -> Permit:
        """Wait for a permit for a request of about ``tokens`` tokens.

        Raises:
            PauseTooLong: the server's pause lasts longer than ``patience`` seconds from now.
        """
        async with self._queue:
            permit, queued_at = Permit(0.0, tokens), self._clock()
            while True:
                with self._shared():
                    permit.at = self._clock()
                    wait = self._wait(tokens)
                    if (remaining := self._paused_until - permit.at) > patience:
                        self._waiting.pop(permit.id, None)
                        raise PauseTooLong(
                            f"the server asked for a pause of another {remaining:.0f} s: {self._pause_reason}"
                        )
                    if not self._is_first(permit, queued_at):
                        wait = QUEUE_POLL_S
                    elif wait <= 0:
                        del self._waiting[permit.id]
                        if self._requests or self._tokens:
                            self._permits.append(permit)
                        return permit
                await self._sleep(min(wait, RECHECK_S))

    def _is_first(self, permit: Permit, queued_at: float) -> bool:
        """Register the permit as waiting; return whether no live waiter is ahead of it."""
        self._waiting = {
            key: times for key, times in self._waiting.items() if 0 <= permit.at - times[1] < STALE_WAITER_S
        }
        self._waiting[permit.id] = (queued_at, permit.at)
        return min(self._waiting, key=lambda key: (self._waiting[key][0], key)) == permit.id

    def record_tokens(self, finished: Permit, tokens: int) -> None:
        """Replace a permit's estimate by the tokens that its request used.

        If the file cannot be written, the estimate stays.
        """
        with suppress(OSError), self._shared():
            for permit in self._permits:
                if permit.id == finished.id:
                    permit.tokens = tokens

    def pause(self, seconds: float, reason: str) -> None:
        """Grant no permit for ``seconds`` seconds, as the server asked; ``reason`` is quoted in errors."""
        with self._shared():
            pause_end = self._clock() + seconds
            if pause_end > self._paused_until:
                self._paused_until, self._pause_reason = pause_end, reason

    def _wait(self, tokens: int) -> float:
        now = self._clock()
        while self._permits and self._permits[0].at + MINUTE <= now:
            self._permits.popleft()
        wait = self._paused_until - now
        if self._requests and len(self._permits) >= self._requests:
            wait = max(wait, self._permits[-self._requests].at + MINUTE - now)
        return max(wait, self._until_tokens_fit(tokens, now))

    def _until_tokens_fit(self, tokens: int, now: float) -> float:
        excess = sum(permit.tokens for permit in self._permits) + tokens - self._tokens
        if not self._tokens or excess <= 0:
            return 0.0
        for permit in self._permits:
            excess -= permit.tokens
            if excess <= 0:
                return permit.at + MINUTE - now
        return self._permits[-1].at + MINUTE - now if self._permits else 0.0

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """Lock and load the state in the file, and write it back after the body; do nothing without a file."""
        if self._file is None:
            yield
            return
        with open(os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._load(file.read())
            try:
                yield
            finally:
                file.seek(0)
                # Written in one piece before the file is truncated, so the file always starts with a whole JSON
                # document.
                file.write(self._serialized())
                file.truncate()

    def _serialized(self) -> str:
        permits = [(permit.at, permit.tokens, permit.id) for permit in self._permits]
        pause = {"not_before": self._paused_until, "why": self._pause_reason}
        return json.dumps({"boot": _boot_id(), "begun": permits, "waiting": self._waiting, **pause})

    def _load(self, text: str) -> None:
        """Load the shared state; ignore a truncated file and one from before the last reboot."""
        own_pause = self._paused_until
        self._permits, self._waiting, self._paused_until = deque(), {}, own_pause
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            state, _ = json.JSONDecoder().raw_decode(text)
            # A monotonic clock restarts at boot: moments of an earlier boot would be in the future.
            if state["boot"] == _boot_id():
                now = self._clock()
                self._permits = deque(
                    permit for permit in (Permit(*permit) for permit in state["begun"]) if permit.at <= now
                )
                self._waiting = {
                    key: (queued_at, last_seen) for key, (queued_at, last_seen) in state["waiting"].items()
                }
                shared_pause = min(float(state["not_before"]), now + MAX_SHARED_PAUSE_S)
                if shared_pause > own_pause:
                    self._paused_until, self._pause_reason = shared_pause, str(state["why"])


@cache
def _boot_id() -> str:
    try:
        return BOOT_ID_FILE.read_text()
    except OSError:
        return ""


class CircuitOpen(Exception):
    """The circuit breaker allows no request before the caller's deadline."""


class CircuitBreaker:
    """Lets requests pass while the server works, and one probe at a time after repeated failures.

    Invariants: the breaker opens after ``FAILURE_THRESHOLD`` failures in a row over all callers. While it is open, one
    caller may probe after a pause: a success closes the breaker, a failure doubles the pause up to ``MAX_OPEN_S``. If a
    probe is cancelled, the next caller may probe. Raises ``CircuitOpen``.
    """

    def __init__(self, clock: Clock, sleep: Sleep) -> None:
        self._clock, self._sleep = clock, sleep
        self._failures = 0
        self._last_failure = ""
        # The current pause; 0 while the breaker is closed.
        self._open_s = 0.0
        self._open_until = 0.0
        self._probe: asyncio.Event | None = None

    @asynccontextmanager
    async def guard(
        self, deadline: float, *, failed: type[Exception], alive: tuple[type[Exception], ...]
    ) -> AsyncIterator[None]:
        """Run the body as soon as a request is allowed.

        An exception of class ``failed`` counts as a failure of the server, one of ``alive`` as a sign that the server
        is up. Any other exception, such as a defect in this program, says nothing about the server.

        Raises:
            CircuitOpen: no request is allowed before ``deadline`` (a moment of the clock).
        """
        probe = await self._enter(deadline)
        try:
            yield
        except failed as error:
            self._failed(str(error), probing=probe is not None)
            raise
        except alive:
            self._close()
            raise
        else:
            self._close()
        finally:
            if probe is not None:
                self._probe = None
                probe.set()

    async def _enter(self, deadline: float) -> asyncio.Event | None:
        """Wait until a request is allowed; return the probe's event if the caller is the probe, else None."""
        while self._open_s:
            if self._probe is not None:
                await self._probe.wait()
                continue
            now = self._clock()
            if now >= self._open_until:
                self._probe = asyncio.Event()
                return self._probe
            if self._open_until > deadline:
                raise CircuitOpen(
                    f"it failed {self._failures} times in a row; the next attempt is in "
                    f"{self._open_until - now:.0f} s, by one request; last failure: {self._last_failure}"
                )
            await self._sleep(self._open_until - now)
        return None

    def _failed(self, message: str, *, probing: bool) -> None:
        self._failures += 1
        self._last_failure = message
        if probing or (not self._open_s and self._failures >= FAILURE_THRESHOLD):
            self._open_s = min(MAX_OPEN_S, 2 * self._open_s or FIRST_OPEN_S)
            self._open_until = self._clock() + self._open_s

    def _close(self) -> None:
        self._failures, self._open_s = 0, 0.0
