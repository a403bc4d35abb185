"""Waiting for a condition that another task, thread or process brings about.

After ``within_s`` seconds both functions raise ``AssertionError`` with the condition's last value and with what
``message`` returns, a log or a screen's text; it is called only then.
"""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(
    condition: Callable[[], T],
    *,
    within_s: float = 60.0,
    every_s: float = 0.02,
    message: Callable[[], object] | None = None,
) -> T:
    """Block the thread until the condition holds; returns its first truthy value."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        _check_deadline(deadline, within_s, value, message)
        time.sleep(every_s)
    return value


async def eventually_async(
    condition: Callable[..., object],
    *,
    within_s: float = 60.0,
    every_s: float = 0.02,
    message: Callable[[], object] | None = None,
) -> None:
    """Let other tasks run until the condition, a function or a coroutine function, holds."""
    deadline = time.monotonic() + within_s
    while not (value := await _value(condition())):
        _check_deadline(deadline, within_s, value, message)
        await asyncio.sleep(every_s)


async def _value(value: object) -> object:
    return await value if inspect.isawaitable(value) else value


def _check_deadline(deadline: float, within_s: float, value: object, message: Callable[[], object] | None) -> None:
    # Called after the condition was: a test that was suspended for long looks once more before it fails.
    if time.monotonic() >= deadline:
        details = "" if message is None else f"\n{message()}"
        raise AssertionError(f"not within {within_s:g} s; the last value is {value!r}{details}")
