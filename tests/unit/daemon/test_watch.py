"""Samples for listeners: a failing sample is skipped and taken again, whatever the error."""

import asyncio
from datetime import UTC, datetime

from pydantic import BaseModel

from traced.daemon.live_state import LiveState, Sample, Watch

NOW = datetime(2026, 3, 14, 9, tzinfo=UTC)


class Figure(BaseModel):
    """A sampled value."""

    number: int


async def test_a_sample_that_fails_is_left_out_and_the_next_one_counts() -> None:
    samples: list[int] = []

    def take() -> Figure:
        samples.append(len(samples))
        if len(samples) == 2:
            raise ZeroDivisionError
        return Figure(number=len(samples))

    live_state, numbers = LiveState(), []
    watch = Watch({"figure": Sample(take, 0.001)}, live_state, lambda: NOW)
    with watch.is_sampling():
        for _ in range(2000):
            numbers = [event.detail["number"] for event in live_state.of("figure")]
            if len(samples) > 4 and numbers:
                break
            await asyncio.sleep(0.001)
    assert not watch.at_work
    assert live_state.of("figure") == []
    [number] = numbers
    assert number > 2
