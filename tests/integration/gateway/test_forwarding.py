"""Byte for byte: what goes to the engine and comes back, errors and ends that come early."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.gateway.place import USER, V1, RunningGateway, running_gateway
from tests.integration.gateway.upstream import BASE
from tests.waiting import eventually_async
from traced.gateway import app, forwarding


async def run(tmp_path: Path, check: Callable[[RunningGateway], Coroutine[Any, Any, None]], **kind: Any) -> None:
    async with running_gateway(tmp_path, **kind) as gateway:
        await check(gateway)


async def test_unknown_fields_pass_through_both_ways(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        odd = {"n": 2, "extension": {"deep": [1, None, 1e-7, 2**70, "\ud800"]}, "logprobs": True}
        answer = await gateway.ask("base", **odd)
        assert answer.json()["extension"] == odd["extension"]
        assert gateway.engine.requests == [{"model": BASE, "messages": USER, **odd}]

    await run(tmp_path, check)


async def test_openais_client_reads_answers_streams_and_errors(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == ["auto", "base", V1]
            completion: Any = await client.chat.completions.create(model="auto", messages=USER)
            stream: Any = await client.chat.completions.create(model="auto", messages=USER, stream=True)
            parts = [chunk.choices[0].delta.content async for chunk in stream]
            assert "".join(parts) == completion.choices[0].message.content == f"signed {V1}"
            gateway.engine.status = 429
            with pytest.raises(openai.RateLimitError, match="slow down") as exc_info:
                await client.chat.completions.create(model="auto", messages=USER)
            assert exc_info.value.response.headers["Retry-After"] == "7"
            gateway.engine.status = 200
            responded = await client.responses.create(model="base", input="Which day?")
            assert responded.output_text == f"signed {BASE}"

    await run(tmp_path, check, live=V1)


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b"{", 400, "not readable JSON"),
        (b"[]", 400, "JSON object"),
        (b"{}", 400, "model is required"),
        (b'{"model": "base", "messages": 3}', 400, "messages"),
        (b'{"model": "base", "messages": [], "tools": %b%b}' % (b"[" * 300, b"]" * 300), 400, "nested deeper than 200"),
        (b'{"model": "base", "messages": ["x"]}', 400, "messages"),
        (json.dumps({"model": "base", "pad": "x" * 2**20}).encode(), 413, "1 MiB"),
    ],
)
async def test_bad_requests_are_refused_in_openais_form(tmp_path: Path, body: bytes, status: int, word: str) -> None:
    async def check(gateway: RunningGateway) -> None:
        response = await gateway.http.post("/v1/chat/completions", content=body)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (status, "invalid_request_error")
        assert word in error["message"]
        assert gateway.engine.requests == []

    await run(tmp_path, check, settings={"serving.body_mb": 1})


@pytest.mark.parametrize("calls", ["x", [3], [{"function": "f"}], {"a": 1}])
async def test_messages_that_make_no_sense_are_the_engines_to_refuse(tmp_path: Path, calls: Any) -> None:
    async def check(gateway: RunningGateway) -> None:
        messages = [*USER, {"role": "assistant", "tool_calls": calls}]
        assert (await gateway.ask("base", messages)).status_code == 200
        assert gateway.engine.requests[0]["messages"] == messages

    await run(tmp_path, check)


@pytest.mark.parametrize("name", ["", "x" * 201, "caf\u00e9", "a\tb"])
async def test_a_conversation_header_is_printable_ascii(tmp_path: Path, name: str) -> None:
    async def check(gateway: RunningGateway) -> None:
        headers = {"X-Traced-Conversation": name.encode("latin-1")}
        assert (await gateway.ask("base", headers=headers)).status_code == 400

    await run(tmp_path, check)


async def test_a_defect_is_answered_and_accounted_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(gateway: RunningGateway) -> None:
        monkeypatch.setattr(forwarding, "with_model", lambda *_: 1 / 0)
        answer = await gateway.ask("base", headers={"X-Traced-Conversation": "defect"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "defect")
        await eventually_async(lambda: gateway.exchanges("defect"))
        assert "ZeroDivisionError" in gateway.exchanges("defect")[0].detail

    await run(tmp_path, check)


async def test_an_unrecordable_exchange_is_answered_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(gateway: RunningGateway) -> None:
        monkeypatch.setattr(app, "line_of", lambda *_, **__: 1 / 0)
        assert (await gateway.ask("base")).status_code == 200
        assert "1 conversations could not be recorded" in (await gateway.http.get("/ready")).json()["recording"]

    await run(tmp_path, check)


async def test_a_client_that_hangs_up_ends_the_engines_work(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.engine.delay_s = 20
        for streamed in (False, True):
            request_task = asyncio.create_task(
                gateway.ask("base", stream=streamed, headers={"X-Traced-Conversation": "gone"})
            )
            await eventually_async(lambda: gateway.engine.running)
            request_task.cancel()
            await eventually_async(lambda: not gateway.engine.running)
        assert gateway.engine.hung_up == 2
        await eventually_async(lambda: len(gateway.exchanges("gone")) == 2)
        assert {exchange.status for exchange in gateway.exchanges("gone")} == {499}

    await run(tmp_path, check)


async def test_a_stream_that_breaks_off_ends_with_an_error_and_without_done(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.engine.break_after, gateway.engine.delay_s = 2, 0.05
        answer = await gateway.ask("base", stream=True, headers={"X-Traced-Conversation": "broken"})
        assert "[DONE]" not in answer.text
        assert (
            json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))["error"]["code"] == "engine_error"
        )
        await eventually_async(lambda: gateway.exchanges("broken"))
        (exchange,) = gateway.exchanges("broken")
        assert exchange.status == 502
        assert "closed the connection" in exchange.detail

    await run(tmp_path, check)


async def test_an_engine_that_dies_during_an_answer_is_a_bad_gateway(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.engine.delay_s = 5
        request_task = asyncio.create_task(gateway.ask("base"))
        await eventually_async(lambda: gateway.engine.running)
        await gateway.engine.stop()
        response = await request_task
        assert (response.status_code, response.json()["error"]["code"]) == (502, "engine_error")

    await run(tmp_path, check)


async def test_a_conversation_goes_on_after_a_stream_that_its_client_stopped(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        gateway.engine.words, gateway.engine.delay_s = [f"word{number} " for number in range(40)], 0.05
        body = {"model": "base", "messages": USER, "stream": True}
        text, name, response_id = "", "", ""
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as stream:
            name = stream.headers["X-Traced-Conversation"]
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    text, response_id = text + event["choices"][0]["delta"]["content"], event["id"]
                if text.count("word") == 3:
                    break
        await eventually_async(lambda: len(gateway.exchanges(name)) == 1)
        gateway.engine.delay_s = 0.0
        follow_up = [*USER, {"role": "assistant", "content": text}, {"role": "user", "content": "Shorter, please."}]
        assert (await gateway.ask("base", follow_up)).headers["X-Traced-Conversation"] == name
        # Its user judges what was stopped.
        feedback = {"response_id": response_id, "score": 0.0}
        assert (await gateway.http.post("/v1/feedback", json=feedback)).json()["conversation_id"] == name

    await run(tmp_path, check)
