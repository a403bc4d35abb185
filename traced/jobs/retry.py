"""Decide when an input is retried and when it is quarantined, and write attempts to the store.

The decisions are pure functions of an input's attempts. Which attempts count against an input (``counted_failures``):

- a **failed** attempt (attributed to its input) always counts;
- a **blocked** attempt (infrastructure) or a **stopped** one never counts;
- a **lost** attempt (found running, its holder dead) or a **killed** one (a shared component died) counts only as one
  of three or more since the input last made progress, that is, exceeded the progress counter of all attempts before.

A power cut says nothing about the input, and a training that resumes from checkpoints makes progress each time. A stage
that kills its machine dies at the same place again and gets three tries instead of an endless loop of reboots.

A finished attempt or a release resets the count. The number three stands for ``AttemptLedger.failures``.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from random import Random
from typing import TypeVar

import sqlalchemy
from sqlmodel import Session

from store.database import write_session
from store.errors import StoreUnavailable
from store.repositories.attempts import Attempt, AttemptState, QuarantinedInput
from traced.core.seeds import derive_seed
from traced.processes.job import Report, ReportKind

UNCLEAR_STATES = (AttemptState.ABANDONED, AttemptState.KILLED)
UNSUCCESSFUL = (AttemptState.FAILED, AttemptState.BLOCKED, *UNCLEAR_STATES)
T = TypeVar("T")
OnReport = Callable[[Report], None]


@dataclass(frozen=True)
class Backoff:
    """Exponential back-off in seconds: ``base_s * factor**(n-1)`` up to ``cap_s``, with jitter."""

    base_s: float
    factor: float
    cap_s: float

    def delay_s(self, unsuccessful: int, rng: Random) -> float:
        """Return the seconds to wait after this number of unsuccessful attempts in a row; 0 after none."""
        if unsuccessful < 1:
            return 0.0
        # The exponent is bounded, because a float power overflows; every cap is reached before that.
        growth = self.factor ** min(unsuccessful - 1, 64)
        # Jitter, so that inputs which failed together are not retried together.
        return min(self.base_s * growth, self.cap_s) * rng.uniform(0.5, 1.0)


def relevant_attempts(attempts: Sequence[Attempt], last_quarantine_seq: int) -> list[Attempt]:
    """Filter an input's attempts (oldest first) to those after its last quarantine and its last success."""
    relevant: list[Attempt] = []
    for attempt in attempts:
        if attempt.state is AttemptState.FINISHED:
            relevant = []
        elif attempt.seq > last_quarantine_seq:
            relevant.append(attempt)
    return relevant


def counted_failures(attempts: Sequence[Attempt], limit: int) -> list[Attempt]:
    """Return those of an input's ``relevant_attempts`` that count against it.

    Lost and killed attempts count only if there are at least ``limit`` of them without progress.
    """
    failures: list[Attempt] = []
    unclear: list[Attempt] = []
    max_progress = 0
    for attempt in attempts:
        progress = int(attempt.evidence.get("progress", {}).get("done", 0))
        if attempt.state is AttemptState.FAILED:
            failures.append(attempt)
        elif attempt.state in UNCLEAR_STATES:
            unclear = [*unclear, attempt] if progress <= max_progress else []
        max_progress = max(max_progress, progress)
    return sorted(failures + (unclear if len(unclear) >= limit else []), key=lambda attempt: attempt.seq)


def count_unsuccessful(attempts: Sequence[Attempt]) -> int:
    """Count those of an input's ``relevant_attempts`` that did not succeed; stopped ones are not counted."""
    return sum(attempt.state in UNSUCCESSFUL for attempt in attempts)


def retry_delay_s(attempts: Sequence[Attempt], backoff: Backoff, *, seed: int, now: datetime) -> float:
    """Return the seconds until the next attempt after these ``relevant_attempts``.

    The jitter is seeded with the last attempt, so a restart of the service changes nothing.
    """
    unsuccessful = [attempt for attempt in attempts if attempt.state in UNSUCCESSFUL and attempt.ended_at is not None]
    if not unsuccessful or unsuccessful[-1].ended_at is None:
        return 0.0
    last = unsuccessful[-1]
    rng = Random(derive_seed(seed, last.key.stage, last.key.capability, last.key.input_hash, last.seq))
    delay_s = backoff.delay_s(len(unsuccessful), rng)
    elapsed_s = (now - unsuccessful[-1].ended_at).total_seconds()
    # The upper bound matters when the clock was set back.
    return min(max(delay_s - elapsed_s, 0.0), delay_s)


@dataclass(frozen=True)
class AttemptLedger:
    """Stores the attempts of one holder and spaces retries.

    Args:
        failures: The number of counted attempts that quarantines an input.
        on_quarantined: Called in the transaction that quarantines an input.
    """

    store: sqlalchemy.Engine
    holder: str
    backoff: Backoff
    failures: int
    seed: int
    now: Callable[[], datetime]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    on_quarantined: Callable[[Session, QuarantinedInput], None] = lambda session, quarantined: None

    async def transaction(self, call: Callable[[Session], T]) -> T:
        """Run ``call`` in a transaction in a thread; a cancellation waits for its end, so that its outcome is known."""
        return await run_to_completion(self._run, call)

    async def retried_transaction(self, call: Callable[[Session], T], on_report: OnReport) -> T:
        """Run ``call`` as ``transaction`` does; retry with back-off and reports while the database is unavailable."""
        tries = 0
        while True:
            try:
                return await self.transaction(call)
            except StoreUnavailable as error:
                tries += 1
                delay = self.backoff.delay_s(tries, Random(self.seed))
                on_report(waiting_report(delay, str(error)))
                await self.sleep(delay)

    def _run(self, call: Callable[[Session], T]) -> T:
        with write_session(self.store) as session:
            return call(session)


async def run_to_completion(call: Callable[..., T], *arguments: object) -> T:
    """Run ``call`` in a thread and wait for its end; a cancellation in the meantime is raised afterwards."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    cancellation: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        # Marks the exception as retrieved, so that asyncio does not log it.
        running.exception()
        raise cancellation
    return running.result()


def waiting_report(seconds: float, reason: str, state: str = AttemptState.BLOCKED) -> Report:
    """Build the report of a wait: the next attempt follows in ``seconds``; ``reason`` and ``state`` say after what."""
    return Report(ReportKind.WAITING, {"seconds": seconds, "for": reason, "after": state})
