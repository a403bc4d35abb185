"""The HTTP API: real engine, real routes, a socket of this machine."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from tests.unit.inference import tiny
from traced.inference.chat_format import ChatFormat
from traced.inference.client import EngineClient
from traced.inference.embedded.engine import Engine, Request, Sampling
from traced.inference.embedded.server import build_app
from traced.inference.errors import ContextLengthError, EngineError, RequestError, RoutingPromptError, UnknownModelError

torch.set_num_threads(1)
WORDS = tiny.tokenizer()
USER = [{"role": "user", "content": "Hi, I am C381. Please return the lamp."}]
TOOL = {"type": "function", "function": {"name": "get_order", "parameters": {"type": "object"}}}


@asynccontextmanager
async def serving(engine: Engine | None = None) -> AsyncIterator[tuple[httpx.AsyncClient, EngineClient, Engine]]:
    engine = engine or Engine(tiny.qwen3(len(WORDS)), WORDS, max_batch=8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(build_app(engine), log_config=None))
        serves = asyncio.create_task(server.serve([listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            while not server.started and not serves.done():  # noqa: ASYNC110 (uvicorn has no event for it)
                await asyncio.sleep(0.01)
            async with httpx.AsyncClient(base_url=url, trust_env=False) as http, EngineClient(url) as client:
                yield http, client, engine
        finally:
            server.should_exit = True
            await serves


async def run(check: Callable[[httpx.AsyncClient, EngineClient, Engine], Coroutine[Any, Any, None]]) -> None:
    async with serving() as (http, client, engine):
        await check(http, client, engine)


async def test_chat_brings_the_engines_own_tokens() -> None:
    async def check(_: httpx.AsyncClient, client: EngineClient, __: Engine) -> None:
        completion = await client.chat("base", USER, [TOOL], temperature=1.0, max_tokens=9, seed=4)
        prompt_ids = ChatFormat(WORDS).render(USER, [TOOL])
        (expected,) = Engine(tiny.qwen3(len(WORDS)), WORDS).generate([Request(prompt_ids, Sampling(1.0, 9, 4))])
        assert completion.prompt_ids == prompt_ids
        assert completion.completion_ids == expected.ids
        assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert completion.finish_reason == expected.finish_reason
        assert completion.message["role"] == "assistant"
        repeated = await client.chat("base", USER, [TOOL], temperature=1.0, max_tokens=9, seed=4)
        assert repeated.completion_ids == completion.completion_ids

    await run(check)


async def test_many_at_once_equal_each_alone() -> None:
    async def check(_: httpx.AsyncClient, client: EngineClient, __: Engine) -> None:
        conversations = [[{"role": "user", "content": f"order W{i}"}] for i in range(20)]
        expected = [await client.chat("base", m, [], temperature=0.0, max_tokens=6, seed=0) for m in conversations]
        calls = [client.chat("base", m, [], temperature=0.0, max_tokens=6, seed=0) for m in conversations]
        together = await asyncio.gather(*calls)
        assert [c.completion_ids for c in together] == [c.completion_ids for c in expected]

    await run(check)


async def test_adapters_are_models(tmp_path: Path) -> None:
    tiny.save_adapter(tmp_path, seed=1)

    async def check(_: httpx.AsyncClient, client: EngineClient, __: Engine) -> None:
        await client.load_adapter("dates@v1", tmp_path)
        assert await client.models() == ["base", "dates@v1"]
        base = await client.chat("base", USER, [], temperature=0.0, max_tokens=6)
        adapted = await client.chat("dates@v1", USER, [], temperature=0.0, max_tokens=6)
        assert base.logprobs != adapted.logprobs
        await client.unload_adapter("dates@v1")
        assert await client.models() == ["base"]
        with pytest.raises(UnknownModelError, match="dates@v1"):
            await client.chat("dates@v1", USER, [])
        with pytest.raises(UnknownModelError):
            await client.unload_adapter("dates@v1")
        with pytest.raises(RequestError, match="lacks"):
            await client.load_adapter("gone", tmp_path / "nowhere")

    await run(check)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("chat/completions", {"model": "nobody", "messages": USER}, 404, "nobody"),
        ("chat/completions", {"model": "base"}, 400, "messages"),
        ("chat/completions", {"model": "base", "messages": []}, 400, "messages"),
        ("chat/completions", {"model": "base", "messages": USER, "n": 2, "temperature": 0}, 400, "n must be 1"),
        ("chat/completions", {"model": "base", "messages": USER, "top_p": 0.5}, 400, "top_p=0.5"),
        ("chat/completions", {"model": "base", "messages": USER, "temperature": -1}, 400, "temperature"),
        ("chat/completions", {"model": "base", "messages": USER, "tool_choice": "required"}, 400, "tool_choice"),
        (
            "chat/completions",
            {"model": "base", "messages": [{"role": "assistant", "tool_calls": [{}]}]},
            400,
            "template",
        ),
        ("completions", {"model": "base", "prompt": [5] * 600}, 400, "600 tokens"),
        ("completions", {"model": "base", "prompt": [10**9]}, 400, "token ids"),
        ("completions", {"model": "base", "prompt": ""}, 400, "empty"),
        ("completions", {"model": "base", "prompt": ["a", "b"]}, 400, "one prompt"),
        ("nothing", {}, 404, "Not Found"),
    ],
)
async def test_wrong_requests_get_openais_error_shape(
    path: str, body: dict[str, Any], status: int, message: str
) -> None:
    async def check(http: httpx.AsyncClient, _: EngineClient, __: Engine) -> None:
        response = await http.post(f"/v1/{path}", json=body)
        error = response.json()["error"]
        assert response.status_code == status
        assert message in error["message"]
        assert error["type"] == "invalid_request_error"

    await run(check)


async def test_broken_json_is_a_wrong_request() -> None:
    async def check(http: httpx.AsyncClient, _: EngineClient, __: Engine) -> None:
        response = await http.post(
            "/v1/chat/completions", content=b"{oops", headers={"content-type": "application/json"}
        )
        assert response.status_code == 400
        assert "JSON" in response.json()["error"]["message"]

    await run(check)


async def test_a_context_that_is_too_long_has_its_own_error() -> None:
    async def check(_: httpx.AsyncClient, client: EngineClient, __: Engine) -> None:
        with pytest.raises(ContextLengthError, match="context holds 512"):
            await client.chat("base", [{"role": "user", "content": "7" * 600}], [])

    await run(check)


async def test_an_engine_failure_is_a_server_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(http: httpx.AsyncClient, client: EngineClient, engine: Engine) -> None:
        def fail(_: Any) -> Any:
            raise RuntimeError("no memory")

        monkeypatch.setattr(engine._forward, "prefill", fail)
        with pytest.raises(EngineError, match="no memory"):
            await client.chat("base", USER, [])
        response = await http.post("/v1/completions", json={"model": "base", "prompt": "hi"})
        assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")

    await run(check)


async def test_streams_carry_the_whole_message() -> None:
    async def check(http: httpx.AsyncClient, _: EngineClient, __: Engine) -> None:
        body = {"model": "base", "messages": USER, "seed": 1, "max_tokens": 5}
        choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = await http.post("/v1/chat/completions", json=body | options)
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        chunks = [json.loads(line) for line in lines[:-1]]
        assert lines[-1] == "[DONE]"
        assert chunks[0]["choices"][0]["delta"]["content"] == choice["message"]["content"]
        assert chunks[1]["choices"][0]["finish_reason"] == choice["finish_reason"]
        assert chunks[2]["usage"]["completion_tokens"] <= 5

    await run(check)


async def test_a_text_is_streamed_too() -> None:
    async def check(http: httpx.AsyncClient, _: EngineClient, __: Engine) -> None:
        body = {"model": "base", "prompt": "Please return", "seed": 1, "max_tokens": 5}
        response = (await http.post("/v1/completions", json=body)).json()["choices"][0]
        lines = (await http.post("/v1/completions", json=body | {"stream": True})).text.split("\n\n")
        delta, end = (json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:2])
        assert (delta["text"], end["finish_reason"]) == (response["text"], response["finish_reason"])
        assert lines[2] == "data: [DONE]"

    await run(check)


async def test_several_answers_are_those_of_the_seeds_that_follow() -> None:
    async def check(http: httpx.AsyncClient, _: EngineClient, __: Engine) -> None:
        body = {"model": "base", "messages": USER, "max_tokens": 5}
        combined = (await http.post("/v1/chat/completions", json=body | {"seed": 3, "n": 3})).json()
        singles = [(await http.post("/v1/chat/completions", json=body | {"seed": 3 + i})).json() for i in range(3)]
        assert [c["message"] for c in combined["choices"]] == [
            response["choices"][0]["message"] for response in singles
        ]
        assert [c["index"] for c in combined["choices"]] == [0, 1, 2]
        token_count = sum(response["usage"]["completion_tokens"] for response in singles)
        assert combined["usage"]["completion_tokens"] == token_count

    await run(check)


async def test_a_stop_text_ends_the_answer_and_is_not_in_it() -> None:
    async def check(http: httpx.AsyncClient, _: EngineClient, __: Engine) -> None:
        body = {"model": "base", "prompt": "Please return", "temperature": 0, "max_tokens": 12}
        response = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        stop = response[4:6]
        stopped_response = (await http.post("/v1/completions", json=body | {"stop": ["nowhere", stop]})).json()
        choice = stopped_response["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (response[: response.index(stop)], "stop")
        assert stopped_response["usage"]["completion_tokens"] < 12

    await run(check)


async def test_a_client_that_hangs_up_frees_the_engine() -> None:
    async def check(_: httpx.AsyncClient, client: EngineClient, engine: Engine) -> None:
        app = build_app(engine)
        cancelled_event = asyncio.Event()
        parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await cancelled_event.wait()
            return {"type": "http.disconnect"}

        messages: list[Any] = []

        async def send(event: Any) -> None:
            messages.append(event)

        submitted = []
        submit = engine.submit

        def spy(*arguments: Any) -> Any:
            submitted.append(submit(*arguments))
            cancelled_event.set()
            return submitted[-1]

        engine.submit = spy  # type: ignore[assignment]
        await app(scope, receive, send)
        assert submitted[0].cancelled()
        assert messages[0]["status"] == 499

    body = {"model": "base", "messages": USER, "max_tokens": 400}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 1),
    }
    await run(check)


async def test_label_logprobs_are_those_of_the_next_token() -> None:
    async def check(_: httpx.AsyncClient, client: EngineClient, engine: Engine) -> None:
        with torch.inference_mode():
            logits = engine._forward.model(input_ids=torch.tensor([WORDS.encode("Answer:")])).logits[0, -1]
        values, ids = torch.log_softmax(logits, -1).topk(20)
        candidates = [(WORDS.decode([i]), v) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
        words = [
            (t, v)
            for t, v in candidates
            if t == t.strip() and len(t) and sum(t == u.strip() for u, _ in candidates) == 1
        ]
        labels = [t for t, _ in words]
        logprobs = await client.label_logprobs("Answer:", [*labels, "surely not a token"])
        assert logprobs == pytest.approx(dict(words), abs=1e-4)

    await run(check)


async def test_labels_are_checked_against_the_engines_own_tokenizer() -> None:
    async def check(http: httpx.AsyncClient, client: EngineClient, _: Engine) -> None:
        body = (await http.post("/tokenize", json={"prompt": "Answer:A", "add_special_tokens": False})).json()
        assert body["tokens"] == WORDS.encode("Answer:A", add_special_tokens=False)
        assert body["count"] == len(body["tokens"])
        await client.label_ids(["A", "B"])
        with pytest.raises(RoutingPromptError, match="label 'quagga' is not a single token"):
            await client.label_ids(["A", "quagga"])

    await run(check)
