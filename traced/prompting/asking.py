"""A synchronous library at work in a thread of its own; whatever it asks for is done on the event loop, by the caller.

Invariants: an answer is worked for in the caller's own task, so that cancelling the caller cancels that work, and
``answering`` returns only when the thread has ended. How it fails: the first failure (a cancellation too) is raised to
the caller as it was; the thread is unwound by ``Abandoned``, which is no ``Exception`` because libraries swallow those.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


class Abandoned(BaseException):
    """Nobody answers any more."""


async def answering(
    run: Callable[[Callable[[Asked], Answer]], Result], answer: Callable[[Asked], Awaitable[Answer]]
) -> Result:
    """What ``run`` returns; it is called in a thread, with a function that has its argument answered by ``answer``."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[tuple[Asked, Future[Answer]] | None] = asyncio.Queue()

    def ask(what: Asked) -> Answer:
        reply: Future[Answer] = Future()
        loop.call_soon_threadsafe(asked.put_nowait, (what, reply))
        return reply.result()

    thread = asyncio.ensure_future(asyncio.to_thread(run, ask))
    thread.add_done_callback(lambda _: asked.put_nowait(None))
    failure: BaseException | None = None
    while True:
        try:
            entry = await asked.get()
        except asyncio.CancelledError as stop:
            failure = failure or stop
            continue  # what the thread asks for next ends it
        if entry is None:
            break
        what, reply = entry
        if failure is None:
            try:
                reply.set_result(await answer(what))
            except BaseException as error:  # whatever it is, the thread has to end first
                failure = error
        if failure is not None:
            reply.set_exception(Abandoned())
    if failure is not None:
        thread.exception()  # seen, so that asyncio does not report it as forgotten
        raise failure
    return thread.result()
