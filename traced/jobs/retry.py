"""When an input is tried again, and when it is left aside: pure functions of its attempts.

Which attempts count against an input (``counted``):

- one that **failed** by its input's fault always does;
- one that was **blocked** by its surroundings, or was **stopped**, never does;
- one that was **lost** (found running, its holder dead) or **killed** (something shared died under it) counts only as
  one of three or more since the input last got further. A machine that loses power says nothing about what it was
  doing, and a training that resumes from checkpoints gets further each time, so it is never parked for that. A stage
  that kills its machine dies at the same place again: it gets three tries, not an endless loop of reboots. What a
  power cut can cost is that an input without checkpoints which is hit three times in a row waits for a person to
  release it. Further means a higher progress counter than any attempt before (``Reporter.progress``'s ``done``); an
  input that dies at random places seldom sets a new record, so it is parked as well.

An attempt that finished, or a release, wipes the slate. Where the limit is ``failures``, that number takes the place
of three.

Back-off: ``base_s * factor**(n-1)`` up to ``cap_s`` for the n-th unsuccessful attempt in a row (stopped ones aside),
of which a seeded rng takes between half and all, so that what failed together does not come back together.

Where attempts are written, by whom, and how they are spaced.

Invariants: a transaction that has begun is waited for, even by who is cancelled meanwhile, so that nobody is in doubt
whether it happened; a database that is gone is waited for with back-off, and that is told.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from random import Random
from typing import TypeVar

import sqlalchemy
from sqlmodel import Session

from store.database import session
from store.errors import StoreUnavailable
from store.repositories.attempts import Attempt, AttemptState, ParkedInput
from traced.core.seeds import derive_seed
from traced.processes.job import Report, ReportKind

UNCLEAR = (AttemptState.LOST, AttemptState.KILLED)
UNSUCCESSFUL = (AttemptState.FAILED, AttemptState.BLOCKED, *UNCLEAR)


@dataclass(frozen=True)
class Backoff:
    """Growing waits, in seconds."""

    base_s: float
    factor: float
    cap_s: float

    def delay_s(self, unsuccessful: int, rng: Random) -> float:
        """Seconds to wait after the n-th unsuccessful attempt in a row (0: none)."""
        if unsuccessful < 1:
            return 0.0
        growth = self.factor ** min(unsuccessful - 1, 64)  # beyond, every cap is reached
        return min(self.base_s * growth, self.cap_s) * rng.uniform(0.5, 1.0)


def since(attempts: Sequence[Attempt], last_parked_seq: int) -> list[Attempt]:
    """Those of an input's attempts (oldest first) that matter: after its last parking and its last success."""
    matter: list[Attempt] = []
    for attempt in attempts:
        if attempt.state is AttemptState.FINISHED:
            matter = []
        elif attempt.seq > last_parked_seq:
            matter.append(attempt)
    return matter


def counted(attempts: Sequence[Attempt], limit: int) -> list[Attempt]:
    """The attempts (of ``since``) that count against their input."""
    failed: list[Attempt] = []
    dead: list[Attempt] = []
    furthest = 0
    for attempt in attempts:
        reached = _reached(attempt)
        if attempt.state is AttemptState.FAILED:
            failed.append(attempt)
        elif attempt.state in UNCLEAR:
            dead = [*dead, attempt] if reached <= furthest else []
        furthest = max(furthest, reached)
    return sorted(failed + (dead if len(dead) >= limit else []), key=lambda attempt: attempt.seq)


def unsuccessful(attempts: Sequence[Attempt]) -> int:
    """How many attempts (of ``since``) did not succeed; stopped ones aside."""
    return sum(attempt.state in UNSUCCESSFUL for attempt in attempts)


def wait_s(attempts: Sequence[Attempt], backoff: Backoff, *, seed: int, now: datetime) -> float:
    """Seconds until the next attempt after these (of ``since``); the same after a restart of the service.

    A clock that was set back makes nobody wait longer than the back-off itself.
    """
    ended = [attempt for attempt in attempts if attempt.state in UNSUCCESSFUL and attempt.ended_at is not None]
    if not ended or ended[-1].ended_at is None:
        return 0.0
    last = ended[-1]
    rng = Random(derive_seed(seed, last.key.stage, last.key.capability, last.key.input_hash, last.seq))
    delay = backoff.delay_s(len(ended), rng)
    gone = (now - ended[-1].ended_at).total_seconds()
    return min(max(delay - gone, 0.0), delay)


def _reached(attempt: Attempt) -> int:
    return int(attempt.evidence.get("progress", {}).get("done", 0))


T = TypeVar("T")
OnReport = Callable[[Report], None]


@dataclass(frozen=True)
class Ledger:
    """Where attempts are written, by whom, and how they are spaced; ``failures`` park an input."""

    store: sqlalchemy.Engine
    holder: str
    backoff: Backoff
    failures: int
    seed: int
    now: Callable[[], datetime]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    on_parked: Callable[[Session, ParkedInput], None] = lambda opened, parked: None  # in the transaction that parks it

    async def once(self, call: Callable[[Session], T]) -> T:
        """A transaction in a thread; one that has begun is waited for even by who is cancelled."""
        task = asyncio.ensure_future(asyncio.to_thread(self._transaction, call))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            raise

    async def surely(self, call: Callable[[Session], T], on_report: OnReport) -> T:
        """As ``once``, waiting for a database that is gone."""
        tries = 0
        while True:
            try:
                return await self.once(call)
            except StoreUnavailable as error:
                tries += 1
                delay = self.backoff.delay_s(tries, Random(self.seed))
                on_report(waiting(delay, str(error)))
                await self.sleep(delay)

    def _transaction(self, call: Callable[[Session], T]) -> T:
        with session(self.store) as opened:
            return call(opened)


def waiting(seconds: float, what: str, state: str = AttemptState.BLOCKED) -> Report:
    """The report that the next try comes in so many seconds, and what it waits for."""
    return Report(ReportKind.WAITING, {"seconds": seconds, "for": what, "after": state})
