"""The helpers that wait for a condition return as soon as it holds, and fail with its last value."""

import asyncio

import pytest

from tests.waiting import eventually, eventually_async


def test_the_first_truthy_value_is_returned() -> None:
    values = iter([0, "", 7, 8])
    assert eventually(lambda: next(values), every_s=0) == 7


def test_a_condition_that_never_holds_fails_with_its_last_value_and_the_message() -> None:
    with pytest.raises(AssertionError, match=r"not within 0 s; the last value is \[\]\nthe log"):
        eventually(list, within_s=0, message=lambda: "the log")


async def test_other_tasks_run_while_a_coroutine_function_is_waited_for() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, event.set)

    async def is_set() -> bool:
        return event.is_set()

    await eventually_async(is_set)
    await eventually_async(event.is_set)


async def test_an_async_wait_fails_too() -> None:
    async def always_false() -> bool:
        return False

    for condition in (always_false, lambda: None):
        with pytest.raises(AssertionError, match=r"not within 0\.01 s; the last value is (False|None)"):
            await eventually_async(condition, within_s=0.01, every_s=0)
