"""Where attempts are written, by whom, and how they are spaced.

Invariants: a transaction that has begun is waited for, even by who is cancelled meanwhile, so that nobody is in doubt
whether it happened; a database that is gone is waited for with back-off, and that is told.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from random import Random
from typing import TypeVar

import sqlalchemy
from sqlmodel import Session

from store.database import session
from store.errors import StoreUnavailable
from store.repositories.attempts import AttemptState, ParkedInput
from traced.executor.job import Report, ReportKind
from traced.executor.retry import Backoff

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
