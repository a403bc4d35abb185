"""Engines that die or break off: what is tried again, what is not, and when an engine that fails gets no requests."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.integration.gateway.engine_process import EngineProcess, engine_processes
from tests.integration.gateway.place import V1, RunningGateway, running_gateway, until_offered
from tests.integration.gateway.upstream import BASE
from traced.gateway import server
from traced.gateway.circuit_breaker import FAILURES, FIRST_OPEN_S, CircuitBreaker
from traced.gateway.engines import Replica


async def run(tmp_path: Path, check: Callable[[RunningGateway], Coroutine[Any, Any, None]], **kind: Any) -> None:
    async with running_gateway(tmp_path, **kind) as gateway:
        await check(gateway)


async def run_with_processes(
    tmp_path: Path,
    check: Callable[[RunningGateway, list[EngineProcess]], Coroutine[Any, Any, None]],
    count: int,
    **fields: Any,
) -> None:
    async with engine_processes(count, **fields) as engines:
        urls = [engine.url for engine in engines]
        async with running_gateway(tmp_path, engines=0, urls=urls) as gateway:
            await check(gateway, engines)


def conversation(number: int) -> dict[str, str]:
    return {"X-Traced-Conversation": f"c-{number}"}


async def engine_of(gateway: RunningGateway, headers: dict[str, str]) -> str:
    answer = await gateway.ask("base", headers=headers)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


@pytest.mark.slow
async def test_requests_at_an_engine_that_is_killed_are_answered_by_another(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway, engines: list[EngineProcess]) -> None:
        requests = [asyncio.create_task(engine_of(gateway, conversation(number))) for number in range(12)]
        # Every request has been sent to its engine.
        await asyncio.sleep(1.0)
        await engines[0].kill()
        assert Counter(await asyncio.gather(*requests)) == {"engine 1": 12}
        assert await engine_of(gateway, conversation(0)) == "engine 1"
        late = asyncio.create_task(gateway.ask("base", headers=conversation(0)))
        await asyncio.sleep(1.0)
        await engines[1].kill()
        response = await late
        assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_error")
        assert (await gateway.ask("base")).status_code == 503

    await run_with_processes(tmp_path, check, 2, delay_s=2.5)


@pytest.mark.slow
async def test_a_stream_is_repeated_until_its_first_byte_and_never_after(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway, engines: list[EngineProcess]) -> None:
        owner = await engine_of(gateway, conversation(1))
        body = json.dumps({"model": "base", "messages": [], "stream": True})
        async with gateway.http.stream(
            "POST", "/v1/chat/completions", content=body, headers=conversation(1)
        ) as response:
            chunks = response.aiter_text()
            text = await anext(chunks)
            assert owner in text
            await engines[int(owner[-1])].kill()
            text += "".join([chunk async for chunk in chunks])
        events = [json.loads(line.removeprefix("data: ")) for line in text.strip().split("\n\n")]
        assert [set(event) & {"choices", "error"} for event in events] == [{"choices"}, {"error"}]

    await run_with_processes(tmp_path, check, 2, delay_s=1.0)


async def test_a_stream_that_breaks_off_before_its_first_event_is_tried_elsewhere(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        first, second = gateway.engines
        first.break_after = second.break_after = 0
        response = await gateway.ask("base", stream=True)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_error")
        assert (first.answers[BASE], second.answers[BASE]) == (1, 1)
        second.break_after = None
        for number in range(4):
            response = await gateway.ask("base", stream=True, headers=conversation(number))
            assert response.text.endswith("data: [DONE]\n\n")

    await run(tmp_path, check, engines=2)


async def test_auto_is_answered_by_the_base_model_if_the_only_engine_with_the_adapter_breaks_off(
    tmp_path: Path,
) -> None:
    async def check(gateway: RunningGateway) -> None:
        first, second = gateway.engines
        await until_offered(gateway, V1)
        first.break_after, first.delay_s = 0, 0.0
        response = await gateway.ask("auto", stream=True)
        assert (response.status_code, response.headers["X-Traced-Model"]) == (200, "base")
        assert second.answers == {BASE: 1}
        response = await gateway.ask(V1, stream=True)
        assert response.status_code == 502

    await run(tmp_path, check, engines=2, live=V1, refuses_loads=(1,))


@pytest.mark.parametrize("status", [502, 503])
async def test_a_request_that_an_engine_does_not_take_goes_to_another(tmp_path: Path, status: int) -> None:
    async def check(gateway: RunningGateway) -> None:
        first, second = gateway.engines
        first.status = status
        answers = [await gateway.ask("base", headers=conversation(number)) for number in range(40)]
        assert {answer.status_code for answer in answers} == {200}
        assert second.answers[BASE] == 40
        # About half of them would be sent to it first, but its circuit opens.
        assert FAILURES <= len(first.requests) < 12
        second.status = status
        refusal = await gateway.ask("base", headers=conversation(0))
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (status, "engine_unavailable")
        assert f"it answers with status {status}" in refusal.json()["error"]["message"]
        assert refusal.headers["Retry-After"] == "7"  # the engine's

    await run(tmp_path, check, engines=2)


@pytest.mark.parametrize("status", [500, 504])
async def test_a_request_that_an_engine_has_worked_on_is_not_repeated(tmp_path: Path, status: int) -> None:
    async def check(gateway: RunningGateway) -> None:
        for engine in gateway.engines:
            engine.status = status
        assert (await gateway.ask("base")).status_code == status
        assert sum(len(engine.requests) for engine in gateway.engines) == 1

    await run(tmp_path, check, engines=2)


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


async def test_an_engine_that_looks_healthy_but_fails_gets_one_trial_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(server, "Replica", lambda client: Replica(client, breaker=CircuitBreaker(clock)))

    async def ask_all(gateway: RunningGateway) -> None:
        requests = [gateway.ask("base", stream=True, headers=conversation(number)) for number in range(20)]
        assert {response.status_code for response in await asyncio.gather(*requests)} == {200}

    async def status(gateway: RunningGateway) -> str:
        return str((await gateway.http.get("/ready")).json()["engines"][gateway.engines[0].url])

    async def check(gateway: RunningGateway) -> None:
        first, second = gateway.engines
        first.break_after = 0
        await ask_all(gateway)
        # Requests that had been sent before the circuit opened fail as well.
        failures = first.answers[BASE]
        assert FAILURES <= failures <= 20
        assert "requests failed" in await status(gateway)
        await ask_all(gateway)
        assert first.answers[BASE] == failures
        clock.seconds += FIRST_OPEN_S
        await ask_all(gateway)
        assert first.answers[BASE] == failures + 1
        first.break_after = None
        clock.seconds += 2 * FIRST_OPEN_S
        await ask_all(gateway)
        assert await status(gateway) == "ok"
        # With the only other engine gone, a circuit refuses nothing.
        first.break_after = 0
        await ask_all(gateway)
        assert await status(gateway) != "ok"
        await second.stop()
        first.break_after = None
        assert (await gateway.ask("base", stream=True)).status_code == 200

    await run(tmp_path, check, engines=2)
