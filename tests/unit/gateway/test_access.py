"""How much the router takes on: places and the queue."""

import asyncio

import pytest

from traced.gateway.access import ConcurrencyLimit
from traced.gateway.errors import Refusal


async def test_slots_are_first_come_first_served() -> None:
    gate, order, release_event = ConcurrencyLimit(2, 10, 5.0), [], asyncio.Event()

    async def run_request(number: int) -> None:
        async with gate:
            order.append(number)
            await release_event.wait()

    tasks = [asyncio.create_task(run_request(number)) for number in range(6)]
    await asyncio.sleep(0)
    assert (gate.running, gate.waiting, order) == (2, 4, [0, 1])
    tasks[3].cancel()
    release_event.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (gate.running, gate.waiting, order) == (0, 0, [0, 1, 2, 4, 5])


async def test_excess_requests_are_refused_with_retry_after() -> None:
    gate = ConcurrencyLimit(1, 1, 0.05)
    async with gate:
        waiting = asyncio.create_task(gate.__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(Refusal, match="1 requests run, 1 wait") as full:
            await gate.__aenter__()
        assert (full.value.status, full.value.retry_after, full.value.code) == (429, 1, "queue_full")
        with pytest.raises(Refusal, match="no slot became free within"):
            await waiting
    assert (gate.running, gate.waiting) == (0, 0)
    async with gate:
        assert gate.running == 1


async def test_a_slot_passed_to_a_cancelled_waiter_is_not_lost() -> None:
    gate = ConcurrencyLimit(1, 5, 5.0)
    await gate.__aenter__()
    waiting = asyncio.create_task(gate.__aenter__())
    await asyncio.sleep(0)
    await gate.__aexit__(None, None, None)  # hands its place over
    waiting.cancel()  # before the waiter has run
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert gate.running == 0
