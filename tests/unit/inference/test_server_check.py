"""What a check of a running server says about the faults that vLLM shows."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.unit.inference import tiny
from traced.core.checks import Finding
from traced.inference.chat_format import ChatFormat
from traced.inference.client import EngineClient
from traced.inference.errors import RequestError
from traced.inference.server_check import check_server, refusal

TOKENS = tiny.tokenizer()
STREAM = (
    b'data: {"choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "length"}]}\n\n'
)


@dataclass
class Server:
    """A vLLM at the level of HTTP; ``load`` answers the request to load an adapter, ``tokens`` that for token ids."""

    load: Callable[["Server", str], web.Response]
    tokens: Callable[[str], list[int] | None] = lambda text: TOKENS.encode(text, add_special_tokens=False)
    stream: bytes = STREAM
    cold_logprob: float = -0.001  # of a token sampled at a very low temperature
    loaded: list[str] = field(default_factory=list)
    health_status: int = 200

    async def check(self, *, base: str = "", positions: int = 128) -> list[Finding]:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/v1/load_lora_adapter", self.load_adapter)
        app.router.add_post("/v1/unload_lora_adapter", self.unload_adapter)
        app.router.add_post("/v1/completions", self.complete)
        async with TestServer(app) as server, EngineClient(str(server.make_url("")).rstrip("/"), base=base) as client:
            return await check_server(client, ChatFormat(TOKENS), Path("/probe"), rank=16, positions=positions)

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health_status)

    async def complete(self, request: web.Request) -> web.Response:
        is_cold = 0 < (await request.json())["temperature"] < 0.1
        return web.Response(
            body=self.stream.replace(b"-0.5", str(self.cold_logprob).encode()) if is_cold else self.stream
        )

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "served", "max_model_len": 128}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        ids = self.tokens((await request.json())["prompt"])
        return web.json_response({"tokens": ids}) if ids is not None else web.Response(status=404)

    async def load_adapter(self, request: web.Request) -> web.Response:
        return self.load(self, (await request.json())["lora_name"])

    async def unload_adapter(self, request: web.Request) -> web.Response:
        self.loaded.remove((await request.json())["lora_name"])
        return web.Response()


def accepts(server: Server, name: str) -> web.Response:
    server.loaded.append(name)
    return web.Response()


def refuses(status: int, message: str) -> Callable[[Server, str], web.Response]:
    return lambda server, name: web.json_response({"error": {"message": message}}, status=status)


def run(server: Server, **options: Any) -> list[Finding]:
    return asyncio.run(server.check(**options))


def test_a_sound_server_keeps_no_probe_adapter() -> None:
    server = Server(accepts)
    (finding,) = run(server)
    assert finding.ok
    assert "served, loads adapters of rank 16" in finding.seen
    assert server.loaded == []


@pytest.mark.parametrize(
    ("load", "words", "fix"),
    [
        (lambda server, name: web.Response(status=404, text="Not Found"), "404", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        (refuses(400, "LoRA rank 16 is greater than max_lora_rank 8."), "rank 16", "--max-lora-rank 16"),
        (refuses(500, "Call to add_lora method failed: LoRA is not enabled."), "not enabled", "--enable-lora"),
        (refuses(400, "while loading: no module named experts"), "no module named experts", "the model of model.spec"),
    ],
)
def test_each_refusal_of_an_adapter_names_the_flag(
    load: Callable[[Server, str], web.Response], words: str, fix: str
) -> None:
    (finding,) = run(Server(load))
    assert not finding.ok
    assert words in finding.seen
    assert fix in finding.fix


def test_a_server_of_another_model_is_recognised_by_its_tokens() -> None:
    (finding,) = run(Server(accepts, tokens=lambda text: [1, 2, 3]))
    assert (finding.ok, finding.fix) == (False, "model.spec, or engine.urls: both must be the same model")
    assert "3 tokens instead of" in finding.seen


def test_a_server_without_tokens_to_compare_is_checked_all_the_same() -> None:
    server, tokenizer = run(Server(accepts, tokens=lambda text: None))
    assert server.ok
    assert "/tokenize" in tokenizer.seen
    assert "/tokenize" in tokenizer.warning


def test_a_proxy_that_hides_health_is_refused() -> None:
    (finding,) = run(Server(accepts, health_status=404))
    assert (finding.ok, finding.seen) == (False, "it does not answer /health")
    assert "proxy" in finding.fix


def test_a_server_whose_log_probs_leave_out_the_temperature_is_refused() -> None:
    (finding,) = run(Server(accepts, cold_logprob=-0.5))
    assert (finding.ok, finding.fix) == (False, "start vLLM with --logprobs-mode processed_logprobs")
    assert "before the temperature" in finding.seen


def test_a_server_without_log_probs_is_refused_and_the_adapter_unloaded() -> None:
    server = Server(accepts, stream=b'data: {"choices": [{"token_ids": [7], "finish_reason": "length"}]}\n\n')
    (finding,) = run(server)
    assert not finding.ok
    assert "1 token ids and 0 log-probs" in finding.seen
    assert "return_token_ids" in finding.fix
    assert server.loaded == []


def test_a_model_that_the_server_does_not_list_is_named() -> None:
    (finding,) = run(Server(accepts), base="other")
    assert (finding.ok, finding.fix) == (False, "engine.model")
    assert "'other', but served" in finding.seen


def test_a_server_with_shorter_conversations_is_a_warning() -> None:
    findings = run(Server(accepts), positions=4096)
    assert [finding.ok for finding in findings] == [True, True]
    assert findings[1].warning == "start vLLM with --max-model-len 4096"


def test_a_server_that_does_not_answer_is_a_finding() -> None:
    async def check() -> list[Finding]:
        async with EngineClient("http://127.0.0.1:1") as client:
            return await check_server(client, ChatFormat(TOKENS), Path("/probe"), rank=16, positions=8)

    (finding,) = asyncio.run(check())
    assert (finding.ok, finding.fix) == (False, "engine.urls: is the server running?")


def test_a_rank_is_named_before_the_flag_that_its_message_repeats() -> None:
    error = RequestError("LoRA rank 64 is greater than max_lora_rank 16; restart with --enable-lora")
    assert "--max-lora-rank 64" in refusal(error, 64)[1]
