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
