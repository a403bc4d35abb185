"""Answers of a server that speaks the protocol but leaves out what the client asked for."""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from store.types import Message
from traced.inference.client import EngineClient
from traced.inference.errors import EngineError

MESSAGES: list[Message] = [{"role": "user", "content": "Which?"}]


@pytest.mark.parametrize("prompt", ["Answer:", MESSAGES], ids=["completions", "chat"])
@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": [{"logprobs": None}]},
        {"choices": [{"logprobs": {"content": [], "top_logprobs": []}}]},
        {"choices": [{"logprobs": {"content": [{}], "top_logprobs": [None]}}]},
        "not JSON",
    ],
)
async def test_a_server_without_logprobs_is_reported(prompt: str | Sequence[Message], answer: Any) -> None:
    async def complete(request: web.Request) -> web.Response:
        return web.Response(text=answer) if isinstance(answer, str) else web.json_response(answer)

    application = web.Application()
    application.router.add_post("/v1/completions", complete)
    application.router.add_post("/v1/chat/completions", complete)
    async with TestServer(application) as server, EngineClient(str(server.make_url("")).rstrip("/")) as client:
        with pytest.raises(EngineError, match="without the log-probs of its first token"):
            await client.label_logprobs(prompt, ["A", "B"])


async def test_an_engine_that_hangs_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traced.inference.client.HEALTH_TIMEOUT", aiohttp.ClientTimeout(total=0.1))

    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(2)
        return web.Response()

    application = web.Application()
    application.router.add_get("/health", hang)
    async with TestServer(application) as server, EngineClient(str(server.make_url("")).rstrip("/")) as client:
        async with asyncio.timeout(1.5):
            assert not await client.health()


@pytest.mark.parametrize(
    ("earlier_labels", "later_labels", "adapters"),
    [
        ('running_lora_adapters="a@v1,b@v1",waiting_lora_adapters="c@v1"', None, {"a@v1", "c@v1"}),
        ('running_lora_adapters="",waiting_lora_adapters="a@v1"', 'waiting_lora_adapters="c@v1"', {"c@v1"}),
        ('running_lora_adapters="a@v1"', 'running_lora_adapters=""', set()),
        ("", 'running_lora_adapters="c@v1"', {"c@v1"}),
        ("", "", None),
    ],
)
async def test_the_adapters_in_use_are_those_after_all_earlier_requests_have_begun(
    earlier_labels: str, later_labels: str | None, adapters: set[str] | None
) -> None:
    """vLLM reports an adapter from its first token on, and keeps what it has ever reported."""
    reports = [earlier_labels]
    prompts = []

    async def complete(request: web.Request) -> web.Response:
        prompts.append(await request.json())
        if later_labels is not None:
            reports.append(later_labels)
        return web.json_response({})

    async def metrics(request: web.Request) -> web.Response:
        # The latest one is not the last line.
        lines = [
            f'vllm:lora_requests_info{{max_lora="1",{labels}}} 1.79{number}e+09'
            for number, labels in reversed(list(enumerate(reports)))
            if labels
        ]
        return web.Response(text="\n".join(["# HELP x", "vllm:num_requests_running 1.0", *lines, ""]))

    application = web.Application()
    application.router.add_post("/v1/completions", complete)
    application.router.add_get("/metrics", metrics)
    async with TestServer(application) as server, EngineClient(str(server.make_url("")).rstrip("/")) as client:
        assert await client.adapters_in_use(["a@v1", "c@v1"]) == adapters
    assert [(prompt["model"], prompt["max_tokens"]) for prompt in prompts] == (
        [] if later_labels is None else [("base", 1)]
    )


async def test_an_engine_without_metrics_reports_no_adapters() -> None:
    async def complete(request: web.Request) -> web.Response:
        return web.json_response({})

    application = web.Application()
    application.router.add_post("/v1/completions", complete)
    async with TestServer(application) as server, EngineClient(str(server.make_url("")).rstrip("/")) as client:
        assert await client.adapters_in_use(["a@v1"]) is None
