"""A circuit breaker: an engine whose requests fail in a row gets no requests for a while, even if it looks healthy.

Invariants: ``FAILURES`` failures in a row within ``WINDOW_S`` open the circuit for ``FIRST_OPEN_S``. After that time
one unanswered request at a time may try the engine. If such a trial succeeds, the circuit closes; if it fails, the
circuit opens for twice the time, at most ``MAX_OPEN_S``. Only the end of a request changes the circuit: neither a
health check nor a request that began before the circuit opened closes it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

FAILURES = 3
WINDOW_S = 60.0
FIRST_OPEN_S = 1.0
MAX_OPEN_S = 60.0

CircuitState = Literal["closed", "open", "half-open"]
CIRCUIT_STATES: tuple[CircuitState, ...] = get_args(CircuitState)


@dataclass
class CircuitBreaker:
    """The circuit of one engine; ``clock`` returns monotonic seconds, ``failed_requests`` counts all failures."""

    clock: Callable[[], float] = time.monotonic
    failed_requests: int = 0
    _failures: int = 0
    _first_failure_at: float = 0.0
    _open_s: float = 0.0
    _opened_at: float | None = None
    _openings: int = 0
    _trial: "Attempt | None" = None

    @property
    def state(self) -> CircuitState:
        """Return whether requests pass ("closed"), none does ("open"), or one may try the engine ("half-open")."""
        if self._opened_at is None:
            return "closed"
        return "half-open" if self.clock() >= self._opened_at + self._open_s else "open"

    @property
    def allows_request(self) -> bool:
        """Return whether a request may be sent now."""
        return self.state == "closed" or (self.state == "half-open" and self._trial is None)

    @property
    def problem(self) -> str:
        """Return why the circuit is not closed, in words; "" if it is."""
        if self._opened_at is None:
            return ""
        wait_s = max(0.0, self._opened_at + self._open_s - self.clock())
        return f"its last {self._failures} requests failed; the next one is tried in {wait_s:.0f} s"

    def begin(self) -> "Attempt":
        """Begin a request, as a trial if the circuit is half-open and no other trial waits for a response."""
        attempt = Attempt(self, self._openings)
        if self.state == "half-open" and self._trial is None:
            self._trial = attempt
        return attempt

    def release(self, attempt: "Attempt") -> None:
        """Let the next trial begin, if ``attempt`` is the current one."""
        if self._trial is attempt:
            self._trial = None

    def note_success(self, openings: int) -> None:
        """Close the circuit after a successful request that began after ``openings`` openings."""
        if openings == self._openings:
            self._failures, self._opened_at, self._open_s = 0, None, 0.0

    def note_failure(self, openings: int) -> None:
        """Count a failed request that began after ``openings`` openings, and open the circuit if it is one too many."""
        self.failed_requests += 1
        # Requests that were running when the circuit opened fail for the same reason.
        if openings != self._openings:
            return
        now = self.clock()
        if not self._failures or now - self._first_failure_at > WINDOW_S:
            self._failures, self._first_failure_at = 0, now
        self._failures += 1
        if self._opened_at is not None or self._failures >= FAILURES:
            self._open_s = min(MAX_OPEN_S, 2 * self._open_s or FIRST_OPEN_S)
            self._opened_at, self._openings, self._trial = now, self._openings + 1, None


@dataclass(eq=False)
class Attempt:
    """One request to an engine; ``openings`` is how often the circuit had opened when it began."""

    breaker: CircuitBreaker
    openings: int

    def note_response(self) -> None:
        """Note that the engine has begun to answer: the next trial need not wait for the end of the response."""
        self.breaker.release(self)

    def succeed(self) -> None:
        """Note that the response is complete."""
        self.breaker.note_success(self.openings)

    def fail(self) -> None:
        """Note that the engine did not answer, or not completely."""
        self.breaker.note_failure(self.openings)
