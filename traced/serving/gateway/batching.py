"""Many small questions to the store as few large ones: what is asked while one call runs goes into the next."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")


@dataclass
class Batcher(Generic[Q, A]):
    """Calls ``call`` on a thread with all questions that wait; it returns their answers in order.

    Invariants: one call runs at a time; a question alone waits for nothing. What ``call`` raises is raised to everybody
    in that call. A question whose asker is cancelled is asked none the less.
    """

    call: Callable[[Sequence[Q]], Sequence[A]]
    most: int = 500
    _waiting: "list[tuple[Q, asyncio.Future[A]]]" = field(default_factory=list)
    _worker: "asyncio.Task[None] | None" = None

    async def ask(self, question: Q) -> A:
        """The answer to one question."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self.most], self._waiting[self.most :]
            try:
                found = await asyncio.to_thread(self.call, [question for question, _ in batch])
            except Exception as error:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), told in zip(batch, found, strict=True):
                if not answer.done():
                    answer.set_result(told)
