"""RateLimiter, breaker and budget on a virtual clock."""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.errors import BudgetSpent
from agents.llm.budget import Budget, InFlightUsage
from agents.llm.question import InMemoryLedger, Purpose, Question, Reply, Usage
from agents.llm.rate_limit import (
    FAILURE_THRESHOLD,
    FIRST_OPEN_S,
    MAX_OPEN_S,
    MINUTE,
    CircuitBreaker,
    CircuitOpen,
    PauseTooLong,
    RateLimiter,
)
from agents.llm.server import retry_delay
from tests.virtual_time import VirtualTime

PURPOSE = Purpose("c1", "analyze")
FOREVER = float("inf")


class Busy(Exception):
    """The server's request to retry later."""


class Down(Exception):
    """A failure of the server."""


async def turns(limiter: RateLimiter, time: VirtualTime, tokens: list[int]) -> list[float]:
    started = []
    for token in tokens:
        started.append((await limiter.acquire(token)).at)
        time.now += 0.25
    return started


@given(st.integers(1, 5), st.integers(0, 100), st.lists(st.integers(1, 60), max_size=20))
def test_no_minute_has_more_than_its_requests_and_tokens(requests: int, tokens: int, token_counts: list[int]) -> None:
    time = VirtualTime()
    started = asyncio.run(turns(RateLimiter(requests, tokens, time.clock, time.sleep), time, token_counts))
    assert started == sorted(started)
    for first, at in enumerate(started):
        minute = [
            item for start, item in zip(started[first:], token_counts[first:], strict=True) if start < at + MINUTE
        ]
        assert len(minute) <= requests
        assert not tokens or sum(minute) <= tokens or len(minute) == 1


async def test_without_limits_nobody_waits() -> None:
    time = VirtualTime()
    await turns(RateLimiter(0, 0, time.clock, time.sleep), time, [10**9] * 50)
    assert time.slept == []


async def test_a_reply_that_was_shorter_than_feared_makes_room() -> None:
    time = VirtualTime()
    limiter = RateLimiter(0, 1000, time.clock, time.sleep)
    first = await limiter.acquire(900)
    limiter.record_tokens(first, 100)
    assert ((await limiter.acquire(900)).at - first.at) == 0


async def test_nobody_asks_before_the_moment_that_the_server_named() -> None:
    time = VirtualTime()
    limiter = RateLimiter(0, 0, time.clock, time.sleep)
    limiter.pause(17, "status 429")
    limiter.pause(3, "status 429")
    assert (await limiter.acquire(1)).at == 1017


async def test_nobody_waits_for_a_moment_beyond_his_patience_and_no_breaker_takes_that_for_an_answer() -> None:
    time = VirtualTime()
    breaker = CircuitBreaker(time.clock, time.sleep)
    limiter = RateLimiter(1, 0, time.clock, time.sleep)
    await limiter.acquire(1)
    waits = asyncio.create_task(limiter.acquire(1, patience=60))  # in the queue already
    await asyncio.sleep(0)
    limiter.pause(3600, "status 429: slow down")
    with pytest.raises(PauseTooLong, match=r"pause of another 3[56]\d\d s: status 429: slow down"):
        await waits
    for _ in range(FAILURE_THRESHOLD):
        await ask(breaker, False)
    time.now += FIRST_OPEN_S
    with pytest.raises(PauseTooLong):
        async with breaker.guard(FOREVER, failed=Down, alive=(Busy,)):
            await limiter.acquire(1, patience=60)
    await ask(breaker, False)
    await ask(breaker, True)
    assert time.slept[-1] == 2 * FIRST_OPEN_S  # that one was the probe


async def ask(breaker: CircuitBreaker, answers: bool, deadline: float = FOREVER) -> None:
    with suppress(Down):
        async with breaker.guard(deadline, failed=Down, alive=(Busy,)):
            if not answers:
                raise Down("status 503")


async def test_it_opens_after_so_many_failures_in_a_row_and_only_a_probe_closes_it() -> None:
    time = VirtualTime()
    breaker = CircuitBreaker(time.clock, time.sleep)
    for answers in [False] * (FAILURE_THRESHOLD - 1) + [True] + [False] * FAILURE_THRESHOLD:
        await ask(breaker, answers)
    assert time.slept == []  # one answer in between begins a new row
    with pytest.raises(CircuitOpen, match=f"failed {FAILURE_THRESHOLD} times in a row.*15 s.*one request.*status 503"):
        await ask(breaker, True, deadline=time.now + FIRST_OPEN_S - 1)
    await ask(breaker, False)
    await ask(breaker, True)
    assert time.slept == [FIRST_OPEN_S, 2 * FIRST_OPEN_S]
    await ask(breaker, True)
    assert len(time.slept) == 2


@pytest.mark.parametrize(("raised", "asked_at_once"), [(Busy(), True), (RuntimeError("a defect of ours"), False)])
async def test_a_refusal_closes_it_and_a_defect_of_ours_does_not(raised: Exception, asked_at_once: bool) -> None:
    time = VirtualTime()
    breaker = CircuitBreaker(time.clock, time.sleep)
    for _ in range(FAILURE_THRESHOLD):
        await ask(breaker, False)
    with suppress(Busy, RuntimeError):
        async with breaker.guard(FOREVER, failed=Down, alive=(Busy,)):
            raise raised
    delay = len(time.slept)
    with suppress(Down):
        async with breaker.guard(FOREVER, failed=Down, alive=(Busy,)):
            raise Down("status 503")
    if asked_at_once:  # one failure in a row: it stays closed
        await ask(breaker, True)
        assert len(time.slept) == delay
    else:  # still open: the failure was a probe's
        with pytest.raises(CircuitOpen):
            await ask(breaker, True, deadline=time.now + FIRST_OPEN_S - 1)


async def test_its_pause_grows_to_a_bound() -> None:
    time = VirtualTime()
    breaker = CircuitBreaker(time.clock, time.sleep)
    for _ in range(FAILURE_THRESHOLD + 6):
        await ask(breaker, False)
    assert time.slept == [15, 30, 60, 120, 120, 120] == [min(MAX_OPEN_S, FIRST_OPEN_S * 2**n) for n in range(6)]


async def test_one_probe_goes_at_a_time_and_one_that_is_given_up_leaves_its_place() -> None:
    time = VirtualTime()
    breaker = CircuitBreaker(time.clock, time.sleep)
    for _ in range(FAILURE_THRESHOLD):
        await ask(breaker, False)
    running: list[int] = []
    cancelled: asyncio.Queue[int] = asyncio.Queue()
    release = asyncio.Event()

    async def permit(number: int) -> None:
        async with breaker.guard(FOREVER, failed=Down, alive=()):
            running.append(number)
            cancelled.put_nowait(number)
            await release.wait()

    tasks = [asyncio.create_task(permit(number)) for number in range(5)]
    await cancelled.get()
    for _ in range(20):
        await asyncio.sleep(0)
    assert running == [0]
    tasks[0].cancel()
    await cancelled.get()
    assert len(running) == 2
    release.set()
    await asyncio.gather(*tasks[1:])
    assert sorted(running) == [0, 1, 2, 3, 4]


def reply(tokens: int = 10, cost: float = 0.5, seconds: float = 2.0) -> Reply:
    return Reply("{}", "stop", tokens, 0, cost, seconds)


@pytest.mark.parametrize(
    ("budget", "output"),
    [
        (Budget(tokens=20), "20 tokens of 20 spent on synthesize of dates, in 2 replies"),
        (Budget(cost=1.0, tokens=1000), "1 of 1 in money"),
        (Budget(seconds=3), "4 of 3 seconds"),
    ],
)
async def test_a_budget_error_names_the_exhausted_limits(budget: Budget, output: str) -> None:
    async def story() -> None:
        async with InFlightUsage().reserve(budget, ledger, dates, Usage()):
            raise AssertionError("the budget is spent")

    dates, ledger = Purpose("c1", "synthesize", "dates"), InMemoryLedger()
    for key in ("a", "b"):
        ledger.keep(key, Question(dates, ()), "m", reply())
    ledger.keep("c", Question(Purpose("c1", "synthesize", "other"), ()), "m", reply(10**6))
    with pytest.raises(BudgetSpent, match=output):
        await story()


async def test_requests_in_flight_count_and_callers_wait_for_them() -> None:
    flight, ledger, output = InFlightUsage(), InMemoryLedger(), list[str]()
    landing = asyncio.Event()

    async def permit(name: str, tokens: int) -> None:
        async with flight.reserve(Budget(tokens=100), ledger, PURPOSE, Usage(1, 60)):
            output.append(f"{name} went")
            await landing.wait()
            ledger.keep(name, Question(PURPOSE, ()), "m", reply(tokens))

    tasks = [asyncio.create_task(permit(name, tokens)) for name, tokens in (("a", 30), ("b", 30), ("c", 60))]
    for _ in range(10):
        await asyncio.sleep(0)
    assert output == ["a went", "b went"]  # 0 and 60 are less than 100, 120 is not
    landing.set()
    await asyncio.gather(*tasks)
    with pytest.raises(BudgetSpent, match="120 tokens of 100"):
        await permit("d", 1)
    assert output == ["a went", "b went", "c went"]


NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("0", 0.0),
        ("2.5", 2.5),
        ("-3", 0.0),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90.0),
        (format_datetime(NOW - timedelta(seconds=90), usegmt=True), 0.0),
        ("soon", None),
        ("nan", None),
        ("1e400", 1e9),
        ("Sun, 06 Nov 1994 08:49:37", None),  # without a zone
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, seconds: float | None) -> None:
    assert retry_delay(header, NOW) == seconds
