"""Batch many small calls that each need a thread, such as queries to the store."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from traced.gateway.store_calls import call_store

Q = TypeVar("Q")
A = TypeVar("A")


@dataclass
class Batcher(Generic[Q, A]):
    """Batches many small queries to the store: queries that arrive during one call are sent with the next call.

    Invariants: one call runs at a time, and a query waits only while another call runs. An error is raised to every
    caller of the batch. A query whose caller has given up is not sent.

    Args:
        call: The function that is run on a thread; it returns the answers to its queries in order.
        max_batch: Maximum number of queries in one call.
    """

    call: Callable[[Sequence[Q]], Sequence[A]]
    max_batch: int = 500
    _waiting: "list[tuple[Q, asyncio.Future[A]]]" = field(default_factory=list)
    _worker: "asyncio.Task[None] | None" = None
    _call_started_at: float | None = None

    async def ask(self, query: Q) -> A:
        """Queue one query and return its answer; raises what ``call`` raises."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    def is_hung(self, seconds: float) -> bool:
        """Return whether the running call has taken longer than this."""
        return self._call_started_at is not None and time.monotonic() - self._call_started_at > seconds

    async def _work(self) -> None:
        while self._waiting:
            waiting = [(query, future) for query, future in self._waiting if not future.done()]
            batch, self._waiting = waiting[: self.max_batch], waiting[self.max_batch :]
            if not batch:
                return
            self._call_started_at = time.monotonic()
            try:
                answers = await call_store(partial(self.call, [query for query, _ in batch]), limit_s=None)
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            finally:
                self._call_started_at = None
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
