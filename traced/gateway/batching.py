"""Batch many small calls that each need a thread, such as queries to the store."""

import asyncio
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
    caller of the batch. A query is sent even if its caller has been cancelled.

    Args:
        call: The function that is run on a thread; it returns the answers to its queries in order.
        max_batch: Maximum number of queries in one call.
    """

    call: Callable[[Sequence[Q]], Sequence[A]]
    max_batch: int = 500
    _waiting: "list[tuple[Q, asyncio.Future[A]]]" = field(default_factory=list)
    _worker: "asyncio.Task[None] | None" = None

    async def ask(self, query: Q) -> A:
        """Queue one query and return its answer; raises what ``call`` raises."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self.max_batch], self._waiting[self.max_batch :]
            try:
                answers = await call_store(partial(self.call, [query for query, _ in batch]), limit_s=None)
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
