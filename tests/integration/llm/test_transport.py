"""Servers that are busy, broken, silent or gone: what is tried again, for how long, and what is said in the end."""

import asyncio
import math
import re
import socket
import threading
from typing import Any

import pytest

from agents.errors import BudgetSpent, ModelDenied, ModelRefused, ModelUnavailable
from agents.llm.budget import Budget
from agents.llm.question import ChatMessage, InMemoryLedger, Purpose, Question
from agents.llm.rate_limit import FAILURE_THRESHOLD, FIRST_OPEN_S
from tests.guard.sitecustomize import NetworkForbidden
from tests.integration.llm.llm_client import ANSWER, GOOD, PURPOSE, Fault, ask, endpoint, model, question, run
from tests.scripted_model import (
    Dropped,
    Message,
    NotJson,
    RecordedResponse,
    ScriptedReply,
    Silence,
    Status,
    Text,
    scripted_server,
)
from tests.virtual_time import VirtualTime

ENDLESS = (  # all of the answer but its end, from a server that says no length before
    b'data: {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": '
    b'{"content": "{\\"fault\\": \\"agent\\", \\"message\\": 9}"}}]}\n\n'
)
DOWN = Status(503, message="overloaded")


@pytest.mark.parametrize(
    "misbehaviour",
    [
        Status(500),
        Status(502),
        Status(408),
        Status(409),
        Status(429),
        Dropped(midway=False),
        Dropped(midway=True),
        Dropped(source=GOOD),  # the piece that says that it is whole is missing
        RecordedResponse(ENDLESS),
        NotJson(),
        NotJson(b"data: {nonsense\n\n"),
        NotJson(b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'),
        NotJson(b'data: {"choices": [{"delta": 5}]}\n\ndata: [DONE]\n\n'),
    ],
)
def test_transient_failures_are_retried(misbehaviour: ScriptedReply) -> None:
    time = VirtualTime()
    with scripted_server(lambda body, nth: GOOD if nth > 2 else misbehaviour) as server:
        assert ask(model(server, time)) == ANSWER
        assert len(server.requests) == 4
        assert [0 < slept < 2**n for n, slept in enumerate(time.slept)] == [True] * 3  # full jitter
        assert len(set(time.slept)) == 3


@pytest.mark.parametrize("midway", [False, True])
def test_silence_is_noticed_before_an_answer_and_in_its_middle(midway: bool) -> None:
    with scripted_server(lambda body, nth: GOOD if nth else Silence(60, GOOD, midway)) as server:
        assert ask(model(server, silence_s=0.3)) == ANSWER
        assert len(server.requests) >= 2


@pytest.mark.parametrize("midway", [False, True])
def test_silence_that_is_allowed_is_waited_out(midway: bool) -> None:
    with scripted_server(Silence(0.2, GOOD, midway)) as server:
        assert ask(model(server, silence_s=60.0)) == ANSWER
        assert len(server.requests) == 1


def test_an_answer_that_takes_too_long_as_a_whole_is_given_up() -> None:
    with (
        scripted_server(Silence(60)) as server,
        pytest.raises(ModelUnavailable, match=r"no complete answer in 0.3 s \(llm.timeout_s\)"),
    ):
        ask(model(server, timeout_s=0.3, patience_s=1e-6))


def test_patience_ends_with_the_last_failure_and_a_hint() -> None:
    time = VirtualTime()
    with scripted_server(Status(429, message="slow down, please")) as server, pytest.raises(ModelUnavailable) as raised:
        ask(model(server, time, patience_s=100.0))
    output = str(raised.value)
    assert f"the model scripted at {server.url} is not available: tried {len(server.requests)} times" in output
    assert "the last: status 429" in output
    assert "slow down, please" in output
    assert "llm.patience_s" in output
    assert len(server.requests) > 5
    assert time.now - 1000 <= 100


@pytest.mark.parametrize("later", ["30", "30.5"])
def test_retry_after_of_a_busy_server_holds_for_all_callers(later: str) -> None:
    time = VirtualTime()
    moments: list[float] = []

    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        moments.append(time.now)
        return Status(429, retry_after=later) if nth == 0 else GOOD

    async def batch(llm: Any) -> None:
        assert await llm.ask(question("first"), Fault) == ANSWER
        await asyncio.gather(*(llm.ask(question("x", variant), Fault) for variant in range(5)))

    with scripted_server(script) as server:
        run(model(server, time), batch)
    assert moments[0] == 1000
    assert min(moments[1:]) >= 1000 + math.floor(float(later))


def test_retry_after_of_a_failing_server_holds_for_the_caller() -> None:
    time = VirtualTime()
    with scripted_server(lambda body, nth: GOOD if nth else Status(503, retry_after=40)) as server:
        assert ask(model(server, time)) == ANSWER
    assert time.slept == [40.0]


def test_a_retry_after_beyond_patience_fails_at_once() -> None:
    time = VirtualTime()
    with scripted_server(Status(429, retry_after=3600)) as server:
        with pytest.raises(ModelUnavailable, match="is not available: status 429"):
            ask(model(server, time))
        assert (len(server.requests), time.slept) == (1, [])


@pytest.mark.parametrize("retry_after", ["1e12", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_a_retry_after_beyond_patience_delays_each_caller_by_its_own_patience(retry_after: str) -> None:
    time = VirtualTime()

    async def several_items(llm: Any) -> list[Any]:
        questions = (llm.ask(question("x", variant), Fault) for variant in range(20))
        return list(await asyncio.gather(*questions, return_exceptions=True))

    with scripted_server(lambda body, nth: GOOD if nth else Status(429, retry_after=retry_after)) as server:
        answers = run(model(server, time, concurrency=1), several_items)
        assert {type(answer) for answer in answers} == {ModelUnavailable}
        assert "pause of another" in str(answers[-1])
        assert (len(server.requests), time.slept) == (1, [])


def test_a_storm_of_429_passes_and_everybody_gets_an_answer() -> None:
    time = VirtualTime()

    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        return Status(429, retry_after=1 if nth % 2 else None) if nth < 40 else GOOD

    async def several_items(llm: Any) -> list[Fault]:
        return list(await asyncio.gather(*(llm.ask(question("x", variant), Fault) for variant in range(12))))

    with scripted_server(script) as server:
        assert run(model(server, time, concurrency=4), several_items) == [ANSWER] * 12
        assert len(server.requests) == 52
        assert server.most_at_once <= 4


def test_a_server_that_fails_often_is_left_alone_then_probed_by_one_and_taken_up_again() -> None:
    time = VirtualTime()
    up = threading.Event()

    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        return GOOD if up.is_set() else DOWN

    async def story(llm: Any) -> None:
        answers = await asyncio.gather(
            *(llm.ask(question("x", variant), Fault) for variant in range(3 * FAILURE_THRESHOLD)),
            return_exceptions=True,
        )
        output = [str(answer) for answer in answers]
        assert {type(answer) for answer in answers} == {ModelUnavailable}
        assert all(re.search(r"failed \d+ times in a row; the next attempt|tried", answer) for answer in output)
        assert any("by one request" in answer for answer in output)
        assert all("status 503: overloaded" in answer for answer in output)
        assert len(server.requests) <= 2 * FAILURE_THRESHOLD + 5  # those under way when it opened, then one at a time
        up.set()
        time.now += 1000
        earlier = len(server.requests)
        assert await llm.ask(question("again"), Fault) == ANSWER
        assert len(server.requests) == earlier + 1

    with scripted_server(script) as server:
        run(model(server, time, concurrency=FAILURE_THRESHOLD, patience_s=2 * FIRST_OPEN_S), story)


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (Status(401, message="Incorrect API key provided"), "llm.api_key_env or llm.api_key_file"),
        (Status(403, message="no access"), "no permission"),
        (Status(404, message="The model `scripted` does not exist"), "llm.base_url.*llm.model"),
        (Status(402, message="pay first"), "account"),
        (Status(413, message="too large"), "llm.context_tokens"),
        (Status(429, message="You exceeded your quota", error_code="insufficient_quota"), "account"),
    ],
)
def test_permanent_failures_are_reported_at_once(status: Status, hint: str) -> None:
    time = VirtualTime()
    with scripted_server(status) as server:
        with pytest.raises(ModelRefused, match=f"status {status.code}: {status.message}.*{hint}") as raised:
            ask(model(server, time))
        assert isinstance(raised.value, ModelDenied) is (status.code != 413)  # another question may be shorter
        assert (len(server.requests), time.slept) == (1, [])


def test_nobody_at_the_address() -> None:
    with socket.socket() as bound:  # taken, and nobody listens
        bound.bind(("127.0.0.1", 0))
        with scripted_server(GOOD) as server:
            nobody = model(server, base_url=f"http://127.0.0.1:{bound.getsockname()[1]}/v1", patience_s=5.0)
        with pytest.raises(ModelUnavailable, match=r"the connection failed: .*llm check"):
            ask(nobody)


def test_an_address_that_takes_no_connection_is_given_up_soon() -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for waiting in (first, second):  # nobody accepts them, and there is no place for a third
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        with scripted_server(GOOD) as server:
            nobody = model(
                server, base_url=f"http://127.0.0.1:{full.getsockname()[1]}/v1", connect_s=0.2, patience_s=0.0
            )
        with pytest.raises(ModelUnavailable, match=r"no connection in 0.2 s \(llm.connect_s\)"):
            ask(nobody)


def test_a_stray_call_fails_the_test_at_once() -> None:
    time = VirtualTime()
    for address in ("http://192.0.2.7:8000/v1", "https://api.example.com/v1"):
        with scripted_server(GOOD) as server, pytest.raises(NetworkForbidden, match=r"192\.0\.2\.7|api\.example\.com"):
            ask(model(server, time, base_url=address))
    assert time.slept == []


def test_one_pool_serves_all_and_no_more_are_under_way_than_allowed() -> None:
    release = threading.Barrier(5, timeout=60)

    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        release.wait()  # until five are there
        return GOOD

    async def several_items(llm: Any) -> None:
        await asyncio.gather(*(llm.ask(question("x", variant), Fault) for variant in range(20)))

    with scripted_server(script) as server:
        run(model(server, concurrency=5), several_items)
        assert (len(server.requests), server.most_at_once) == (20, 5)
        assert server.connections <= 5


@pytest.mark.parametrize("limits", [{"requests_per_minute": 3}, {"tokens_per_minute": 400}])
def test_requests_and_tokens_a_minute_are_kept(limits: dict[str, Any]) -> None:
    async def several_items(llm: Any) -> None:
        await asyncio.gather(*(llm.ask(question("x", variant), Fault) for variant in range(7)))

    time = VirtualTime()
    with scripted_server(Message('{"fault": "agent", "message": 3}', usage=(60, 60))) as server:
        run(model(server, time, **limits), several_items)
    assert 120 <= time.now - 1000 < 180  # three at once, three a minute later, and one


def test_the_same_question_at_the_same_time_is_sent_once() -> None:
    ledger = InMemoryLedger()

    async def shared(llm: Any) -> None:
        await asyncio.gather(*(llm.ask(question(), Fault) for _ in range(8)))
        await asyncio.gather(*(llm.ask(question(variant=1), Fault) for _ in range(8)))

    with scripted_server(GOOD) as server:
        run(model(server, ledger=ledger), shared)
        ask(model(server, ledger=ledger))
        assert len(server.requests) == len(ledger.replies) == 2


def test_a_waiter_for_the_same_answer_takes_over_from_a_cancelled_caller() -> None:
    started, release = threading.Event(), threading.Event()

    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        started.set()
        release.wait(60)
        return GOOD

    async def story(llm: Any) -> Fault:
        first = asyncio.create_task(llm.ask(question(), Fault))
        await asyncio.to_thread(started.wait, 60)
        second = asyncio.create_task(llm.ask(question(), Fault))
        await asyncio.sleep(0)
        first.cancel()
        release.set()
        return await second

    with scripted_server(script) as server:
        assert run(model(server), story) == ANSWER
        assert len(server.requests) == 2


def test_usage_is_counted_and_missing_counts_are_estimated() -> None:
    ledger = InMemoryLedger()
    with scripted_server(
        lambda body, nth: Text('{"fault": "agent", "message": 3}', None if nth else (1000, 20))
    ) as server:
        for text in ("told", "untold"):
            ask(model(server, ledger=ledger), question(text))
    output, estimated = (reply for _, reply in ledger.entries)
    assert (output.prompt_tokens, output.completion_tokens, output.estimated) == (1000, 20, False)
    assert output.cost == pytest.approx((1000 * 2 + 20 * 10) / 1e6)
    assert estimated.estimated
    assert 10 <= estimated.prompt_tokens <= 40
    assert 5 <= estimated.completion_tokens <= 20
    assert ledger.usage(PURPOSE).calls == 2


def test_counts_that_lie_do_no_harm() -> None:
    ledger = InMemoryLedger()
    with scripted_server(Text('{"fault": "agent", "message": 3}', (-5, 10**30))) as server:
        assert ask(model(server, ledger=ledger)) == ANSWER
    [(_, reply)] = ledger.entries
    assert (reply.prompt_tokens, reply.completion_tokens) == (0, 2**31 - 1)


def test_a_spent_budget_stops_new_requests_and_stored_replies_stay_free() -> None:
    ledger = InMemoryLedger()

    def question(number: int) -> Question:
        return Question(Purpose("c1", "synthesize", "dates"), (ChatMessage("user", f"question {number}"),))

    async def until_spent(llm: Any) -> None:
        for number in range(9):
            await llm.ask(question(number), Fault)

    with scripted_server(GOOD) as server:
        with pytest.raises(BudgetSpent, match="42 tokens of 40 spent on synthesize of dates, in 3 replies"):
            run(model(server, ledger=ledger, budget=Budget(tokens=40)), until_spent)
        assert len(server.requests) == 3
        retained = model(server, ledger=ledger, budget=Budget(tokens=40))
        assert ask(retained, question(2)) == ANSWER
        assert len(server.requests) == 3


def test_no_second_is_counted_in_which_a_question_waits_for_its_turn() -> None:
    time = VirtualTime()
    ledger = InMemoryLedger()

    async def several_items(llm: Any) -> None:
        await asyncio.gather(*(llm.ask(question("x", variant), Fault) for variant in range(4)))

    with scripted_server(GOOD) as server:
        run(model(server, time, ledger=ledger, concurrency=1, requests_per_minute=1), several_items)
    assert time.now >= 1180
    assert sum(reply.seconds for _, reply in ledger.entries) == 0


def test_an_endpoint_tells_nobody_its_key() -> None:
    with scripted_server(GOOD) as server:
        model = endpoint(server)
    assert model.key.get_secret_value() not in f"{model!r} {model} {model.name}"
