"""What is sampled for listeners: a sample that fails once is taken again, whatever it failed of."""

import asyncio
from datetime import UTC, datetime

from pydantic import BaseModel

from traced.daemon.live_state import LiveState, Sample, Watch

AT = datetime(2026, 3, 14, 9, tzinfo=UTC)


class Figure(BaseModel):
    """What is looked at."""

    number: int


async def test_a_sample_that_fails_is_left_out_and_the_next_one_counts() -> None:
    taken: list[int] = []

    def take() -> Figure:
        taken.append(len(taken))
        if len(taken) == 2:
            raise ZeroDivisionError
        return Figure(number=len(taken))

    present, heard = LiveState(), []
    watch = Watch({"figure": Sample(take, 0.001)}, present, lambda: AT)
    with watch.is_sampling():
        for _ in range(2000):
            heard = [event.detail["number"] for event in present.of("figure")]
            if len(taken) > 4 and heard:
                break
            await asyncio.sleep(0.001)
    assert not watch.at_work
    assert present.of("figure") == []
    [number] = heard
    assert number > 2
