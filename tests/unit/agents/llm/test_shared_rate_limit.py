"""One pace for all processes on a data directory: nobody's requests are forgotten, and nothing in its file is fatal."""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.llm.rate_limit import MAX_SHARED_PAUSE_S, MINUTE, STALE_WAITER_S, PauseTooLong, RateLimiter
from tests.virtual_time import VirtualTime

KILLED = """
import asyncio, os, signal, sys, time
from pathlib import Path
from agents.llm.rate_limit import RateLimiter

async def two():
    pace = RateLimiter(2, 0, time.monotonic, asyncio.sleep, Path(sys.argv[1]))
    await pace.acquire(1)
    await pace.acquire(1)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(two())
"""


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(0, 100), st.lists(st.integers(1, 60), max_size=12))
def test_no_minute_of_several_has_more_than_one_may(requests: int, tokens: int, token_counts: list[int]) -> None:
    async def in_turns(file: Path) -> list[float]:
        paces = [RateLimiter(requests, tokens, virtual.clock, virtual.sleep, file) for _ in range(3)]
        return [(await paces[number % 3].acquire(item)).at for number, item in enumerate(token_counts)]

    virtual = VirtualTime()
    with tempfile.TemporaryDirectory() as folder:
        started = asyncio.run(in_turns(Path(folder) / "pace.json"))
    for first, at in enumerate(started):
        minute = [
            item for start, item in zip(started[first:], token_counts[first:], strict=True) if start < at + MINUTE
        ]
        assert len(minute) <= requests
        assert not tokens or sum(minute) <= tokens or len(minute) == 1


async def test_limiters_on_one_file_share_pauses_and_token_counts(tmp_path: Path) -> None:
    virtual = VirtualTime()
    limiter, other = (RateLimiter(0, 1000, virtual.clock, virtual.sleep, tmp_path / "pace.json") for _ in range(2))
    turn = await limiter.acquire(900)
    limiter.record_tokens(turn, 100)
    assert (await other.acquire(900)).at == virtual.now == 1000  # it was shorter than feared
    limiter.pause(300, "status 429: slow down")
    with pytest.raises(PauseTooLong, match="pause of another 300 s: status 429: slow down"):
        await other.acquire(1, patience=60)
    limiter.pause(1e7, "status 429: no credit")  # of the one's account; the other may have one of its own
    with pytest.raises(PauseTooLong, match="another 10000000 s"):
        await limiter.acquire(1, patience=6000)
    await other.acquire(1, patience=6000)
    assert virtual.now <= 1000 + MAX_SHARED_PAUSE_S


async def test_a_request_that_needs_room_has_its_turn_beside_a_process_that_never_rests(tmp_path: Path) -> None:
    virtual = VirtualTime()
    greedy, modest = (RateLimiter(0, 30_000, virtual.clock, virtual.sleep, tmp_path / "pace.json") for _ in range(2))

    async def saturate() -> None:
        while virtual.now < 1000 + 60 * MINUTE:
            await greedy.acquire(2000)

    for _ in range(15):  # a part of the minute's tokens comes back every four seconds, never much at once
        await greedy.acquire(2000)
        virtual.now += 4
    works = [asyncio.create_task(saturate()) for _ in range(3)]
    started = virtual.now
    turn = await modest.acquire(12_000)
    for work in works:
        work.cancel()
    await asyncio.gather(*works, return_exceptions=True)
    assert (turn.at - started) <= 2 * MINUTE


async def test_whoever_went_away_while_it_waited_holds_nobody_up(tmp_path: Path) -> None:
    virtual = VirtualTime()
    limiter, other = (RateLimiter(1, 0, virtual.clock, virtual.sleep, tmp_path / "pace.json") for _ in range(2))
    await limiter.acquire(1)
    cancelled = asyncio.create_task(limiter.acquire(1))
    for _ in range(10):
        await asyncio.sleep(0)
    cancelled.cancel()
    turn = await other.acquire(1)
    assert turn.at <= 1000 + MINUTE + STALE_WAITER_S


async def test_a_turn_of_a_clock_that_was_ahead_is_not_waited_for(tmp_path: Path) -> None:
    virtual = VirtualTime(now=5000.0)
    await RateLimiter(1, 0, virtual.clock, virtual.sleep, tmp_path / "pace.json").acquire(1)
    virtual.now = 10.0
    await RateLimiter(1, 0, virtual.clock, virtual.sleep, tmp_path / "pace.json").acquire(1)
    assert virtual.slept == []


def test_requests_of_a_killed_process_count_for_their_minute(tmp_path: Path) -> None:
    file, slept = tmp_path / "pace.json", list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        raise TimeoutError

    done = subprocess.run([sys.executable, "-c", KILLED, str(file)], cwd=Path(__file__).parents[4], check=False)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(TimeoutError):
        asyncio.run(RateLimiter(2, 0, time.monotonic, sleep, file).acquire(1))
    assert slept == [1.0]


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"boot": "now"}', "another boot", "a turn of another version", "odd waiting"]
)
async def test_an_unreadable_file_delays_nobody(tmp_path: Path, damage: str) -> None:
    file, virtual = tmp_path / "pace.json", VirtualTime()

    async def turn() -> None:
        await RateLimiter(1, 0, virtual.clock, virtual.sleep, file).acquire(1)

    await turn()
    content = json.loads(file.read_text())
    changes = {"another boot": {"boot": "x"}, "a turn of another version": {"begun": [{"moment": 1}]}}
    changes["odd waiting"] = {"waiting": [3], "begun": []}
    file.write_text(json.dumps(content | changes[damage]) if damage in changes else damage)
    await turn()
    assert virtual.slept == []
    await turn()
    assert sum(virtual.slept) == MINUTE
