"""Call the store from the event loop: on threads of its own, and not for longer than a request may wait.

A store that hangs (a frozen PostgreSQL, a lock) would otherwise take every thread of the executor, on which
the gateway also reads large bodies and hands over its records.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from store.errors import StoreUnavailable

T = TypeVar("T")
THREADS = 32
# A request waits no longer for the store.
LIMIT_S = 10.0
_EXECUTOR = ThreadPoolExecutor(THREADS, thread_name_prefix="store")


async def call_store(call: Callable[[], T], *, limit_s: float | None = LIMIT_S) -> T:
    """Return what ``call`` returns, on a thread.

    Raises:
        StoreError: What ``call`` raises; ``StoreUnavailable`` after ``limit_s`` seconds (None: no limit). The call then
            goes on without a result.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.get_running_loop().run_in_executor(_EXECUTOR, call)
    except TimeoutError as error:
        raise StoreUnavailable(f"no answer from the store within {limit_s:g} s") from error
