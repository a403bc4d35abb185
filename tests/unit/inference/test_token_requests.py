"""Requests in token ids: the stream of one server, silence, and several servers behind one client."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.unit.inference import tiny
from tests.waiting import eventually_async
from traced.inference import client as client_module
from traced.inference import replicas as replicas_module
from traced.inference.chat_format import ChatFormat
from traced.inference.client import UNCHANGED_DISTRIBUTION, EngineClient
from traced.inference.errors import ContextLengthError, EngineError, OverloadedError, RequestError, UnknownModelError
from traced.inference.generation import Request, Sampling
from traced.inference.policies import ChatPolicy, TokenPolicy
from traced.inference.replicas import AFFINITY, ATTEMPTS, Replicas, preferred

REQUEST = Request([1, 2, 3], Sampling(0.7, 5, 11, stop_ids=(9,)))
Answer = Callable[["ScriptedServer", web.StreamResponse, dict[str, Any]], Awaitable[None]]


async def two_tokens(server: "ScriptedServer", response: web.StreamResponse, body: dict[str, Any]) -> None:
    """Answer as vLLM streams: one token per event."""
    for token, reason in ((7, None), (9, "stop")):
        choice = {"token_ids": [token], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": reason}
        await send(response, {"choices": [choice]})


async def send(response: web.StreamResponse, event: Any) -> None:
    """Send one event of the stream."""
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


@dataclass
class ScriptedServer:
    """An engine at the level of HTTP, for faults that a real one does not show on demand."""

    answer: Answer = two_tokens
    bodies: list[dict[str, Any]] = field(default_factory=list)
    adapters: set[str] = field(default_factory=set)
    forgets_adapters: bool = False
    healthy: bool = True
    refuses_adapters: bool = False
    overloaded: int = 0  # requests that are refused for the moment
    sleeping: bool = False
    hangs: bool = False  # with the question whether it sleeps
    url: str = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if not self.healthy:
            return web.json_response({"error": {"message": "the engine is dead"}}, status=500)
        if self.overloaded:
            self.overloaded -= 1
            return web.Response(status=429, text="too many requests", headers={"Retry-After": "1"})
        if body["model"] != "base" and body["model"] not in self.adapters:
            return web.json_response({"error": {"message": f"no model {body['model']}"}}, status=404)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self.answer(self, response, body)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def is_sleeping(self, _: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.sleep(2)
        return web.json_response({"is_sleeping": self.sleeping})

    async def models(self, _: web.Request) -> web.Response:
        names = [{"id": "base"}, *({"id": name, "parent": "base"} for name in sorted(self.adapters))]
        return web.json_response({"data": names}, status=200 if self.healthy else 503)

    async def load(self, request: web.Request) -> web.Response:
        if self.refuses_adapters:
            return web.Response(status=400, text="the rank is too high")
        if not self.forgets_adapters:
            self.adapters.add((await request.json())["lora_name"])
        return web.Response(text="ok")

    async def unload(self, request: web.Request) -> web.Response:
        self.adapters.discard((await request.json())["lora_name"])
        return web.Response(text="ok")


@asynccontextmanager
async def running(*servers: ScriptedServer, silence_s: float = 5.0) -> AsyncIterator[list[EngineClient]]:
    """Run the servers, and yield a client of each."""
    async with AsyncExitStack() as stack:
        clients = []
        for server in servers:
            application = web.Application()
            application.router.add_post("/v1/completions", server.complete)
            application.router.add_post("/v1/chat/completions", server.complete)
            application.router.add_get("/health", server.health)
            application.router.add_get("/is_sleeping", server.is_sleeping)
            application.router.add_get("/v1/models", server.models)
            application.router.add_post("/v1/load_lora_adapter", server.load)
            application.router.add_post("/v1/unload_lora_adapter", server.unload)
            http = await stack.enter_async_context(TestServer(application))
            server.url = str(http.make_url("")).rstrip("/")
            clients.append(await stack.enter_async_context(EngineClient(server.url, silence_s=silence_s)))
        yield clients


async def test_tokens_of_the_stream_are_joined_and_the_distribution_is_not_left_to_the_server() -> None:
    server = ScriptedServer()
    async with running(server) as (client,):
        generation = await client.generate(REQUEST)
    assert (generation.ids, generation.logprobs, generation.finish_reason) == ([7, 9], [-0.5, -0.5], "stop")
    assert generation.server == server.url
    (body,) = server.bodies
    assert body["prompt"] == [1, 2, 3]
    assert body["stop_token_ids"] == [9]
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0.7, 5, 11)
    assert UNCHANGED_DISTRIBUTION.items() <= body.items()


async def test_tokens_without_log_probs_are_an_engine_error() -> None:
    async def without_logprobs(_: ScriptedServer, response: web.StreamResponse, body: dict[str, Any]) -> None:
        await send(response, {"choices": [{"token_ids": [7], "finish_reason": "stop"}]})

    async with running(ScriptedServer(without_logprobs)) as (client,):
        with pytest.raises(EngineError, match="1 token ids and 0 log-probs"):
            await client.generate(REQUEST)


async def test_an_error_in_the_stream_is_an_engine_error() -> None:
    async def error(_: ScriptedServer, response: web.StreamResponse, body: dict[str, Any]) -> None:
        await send(response, {"error": {"message": "out of memory", "code": 500}})

    async with running(ScriptedServer(error)) as (client,):
        with pytest.raises(EngineError, match="out of memory"):
            await client.generate(REQUEST)


async def test_silence_fails_a_request_whatever_its_total_time() -> None:
    async def silent(_: ScriptedServer, response: web.StreamResponse, body: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    async with running(ScriptedServer(silent), silence_s=0.2) as (client,):
        with pytest.raises(EngineError, match=r"no token and no other data for 0.2 s \(engine.silence_s\)"):
            await client.generate(REQUEST)


async def test_a_cancelled_request_ends_at_the_engine() -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def endless(_: ScriptedServer, response: web.StreamResponse, body: dict[str, Any]) -> None:
        has_begun.set()
        try:
            while True:
                await send(response, {"choices": [{"token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}}]})
                await asyncio.sleep(0.01)
        finally:
            # As vLLM, which stops a request when its connection is closed.
            has_ended.set()

    async with running(ScriptedServer(endless)) as (client,):
        request = asyncio.create_task(client.generate(REQUEST))
        await has_begun.wait()
        request.cancel()
        await asyncio.wait_for(has_ended.wait(), 3)


async def test_a_request_waits_as_long_as_the_engine_sleeps() -> None:
    wake_up = asyncio.Event()

    async def asleep(server: ScriptedServer, response: web.StreamResponse, body: dict[str, Any]) -> None:
        await wake_up.wait()
        server.sleeping = False
        await (two_tokens(server, response, body) if body["seed"] == 1 else asyncio.Event().wait())

    server = ScriptedServer(asleep, sleeping=True)
    async with running(server, silence_s=0.2) as (client,):
        requests = [asyncio.create_task(client.generate(Request([1], Sampling(seed=seed)))) for seed in (1, 2)]
        await asyncio.sleep(0.7)
        assert not any(request.done() for request in requests)
        wake_up.set()
        assert (await requests[0]).ids == [7, 9]
        # The silence counts again from then on.
        with pytest.raises(EngineError, match="no token and no other data"):
            await requests[1]


@pytest.mark.parametrize("limit", ["PROBE_S", "SLEEP_LIMIT_S"])
async def test_an_engine_that_hangs_or_sleeps_for_ever_is_silent(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, limit, 0.1)

    async def silent(_: ScriptedServer, response: web.StreamResponse, body: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    server = ScriptedServer(silent, sleeping=True, hangs=limit == "PROBE_S")
    async with running(server, silence_s=0.3) as (client,):
        with pytest.raises(EngineError, match="no token and no other data"):
            await asyncio.wait_for(client.generate(REQUEST), 3)


async def test_a_request_waits_as_long_as_the_engine_answers_others() -> None:
    release = asyncio.Event()

    async def slow(server: ScriptedServer, response: web.StreamResponse, body: dict[str, Any]) -> None:
        if body["seed"] == 1:
            await release.wait()
        else:
            for _ in range(10):
                await asyncio.sleep(0.1)
                await response.write(b": step\n\n")
            release.set()
        await two_tokens(server, response, body)

    requests = [Request([1], Sampling(seed=seed)) for seed in (1, 2)]
    async with running(ScriptedServer(slow), silence_s=0.5) as (client,):
        generations = await asyncio.gather(*map(client.generate, requests))
    assert [generation.ids for generation in generations] == [[7, 9], [7, 9]]


async def arrived(servers: list[ScriptedServer], count: int) -> bool:
    """Whether so many requests have reached the servers."""
    return sum(len(server.bodies) for server in servers) == count


async def test_a_conversation_stays_at_its_engine_until_that_is_much_busier() -> None:
    release = asyncio.Event()

    async def blocked(server: ScriptedServer, response: web.StreamResponse, body: dict[str, Any]) -> None:
        await release.wait()
        await two_tokens(server, response, body)

    servers = [ScriptedServer(blocked), ScriptedServer(blocked)]
    async with running(*servers) as clients:
        replicas = Replicas(clients)
        tasks = [asyncio.create_task(replicas.generate(REQUEST, "one")) for _ in range(AFFINITY + 3)]
        await eventually_async(lambda: arrived(servers, len(tasks)))
        release.set()
        await asyncio.gather(*tasks)
    favourite = next(server for server in servers if server.url == preferred([s.url for s in servers], "one"))
    assert len(favourite.bodies) >= AFFINITY + 1
    assert len(favourite.bodies) < len(tasks)


async def test_a_request_that_lost_its_engine_is_answered_by_another() -> None:
    servers = [ScriptedServer(), ScriptedServer()]
    async with running(*servers) as clients:
        replicas = Replicas(clients)
        dead = next(server for server in servers if server.url == preferred([s.url for s in servers], "one"))
        dead.healthy = False
        generation = await replicas.generate(REQUEST, "one")
        assert generation.server != dead.url
        await replicas.generate(REQUEST, "one")
        assert len(dead.bodies) == 1, "a failed engine gets no further requests"


@pytest.fixture
def quick_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "RETRY_S", 0.05)


async def test_an_engine_that_is_back_gets_requests_again(quick_retry: None) -> None:
    first, second = ScriptedServer(), ScriptedServer()
    async with running(first, second) as clients:
        replicas = Replicas(clients, patience_s=5)
        first.healthy = False
        await asyncio.gather(*(replicas.generate(REQUEST, str(number)) for number in range(10)))
        assert replicas.replicas[0].problem
        first.healthy = True

        async def answers_of_the_first() -> int:
            answers = [(await replicas.generate(REQUEST, str(number))).server for number in range(10)]
            return answers.count(first.url)

        await eventually_async(answers_of_the_first)
        await replicas.aclose()


async def test_requests_that_a_restarted_engine_refuses_at_once_are_all_repeated(quick_retry: None) -> None:
    server = ScriptedServer()
    async with running(server) as clients:
        replicas = Replicas(clients, patience_s=5)
        await replicas.load_adapter("dates", Path("/dates"))
        server.adapters.clear()
        requests = [Request([number], Sampling(0.0, 5, 0), "dates") for number in range(8)]
        answers = await asyncio.gather(*(replicas.generate(request) for request in requests))
        assert [answer.ids for answer in answers] == [[7, 9]] * 8
        await replicas.aclose()


async def test_patience_begins_with_the_loss_of_the_engine(quick_retry: None) -> None:
    async def slow_then_dead(server: ScriptedServer, response: web.StreamResponse, body: dict[str, Any]) -> None:
        if len(server.bodies) == 1:
            await asyncio.sleep(0.6)
            server.healthy = False
            asyncio.get_running_loop().call_later(0.2, setattr, server, "healthy", True)
            raise ConnectionResetError
        await two_tokens(server, response, body)

    async with running(ScriptedServer(slow_then_dead)) as clients:
        replicas = Replicas(clients, patience_s=0.5)
        assert (await replicas.generate(REQUEST)).ids == [7, 9]
        await replicas.aclose()


async def test_a_request_that_ends_every_engine_is_not_repeated_for_ever(quick_retry: None) -> None:
    async def fatal(server: ScriptedServer, response: web.StreamResponse, body: dict[str, Any]) -> None:
        server.healthy = False
        asyncio.get_running_loop().call_later(0.05, setattr, server, "healthy", True)
        raise ConnectionResetError

    server = ScriptedServer(fatal)
    async with running(server) as clients:
        replicas = Replicas(clients, patience_s=60)
        with pytest.raises(EngineError):
            await replicas.generate(REQUEST)
        assert len(server.bodies) == ATTEMPTS
        await replicas.aclose()


async def test_an_adapter_that_one_engine_refuses_stays_at_none() -> None:
    servers = ScriptedServer(), ScriptedServer(refuses_adapters=True)
    async with running(*servers) as clients:
        replicas = Replicas(clients, patience_s=1)
        with pytest.raises(RequestError, match="the rank is too high"):
            await replicas.load_adapter("dates", Path("/dates"))
        assert servers[0].adapters == set()


async def test_a_request_that_is_refused_for_the_moment_is_repeated_until_the_limit_on_silence() -> None:
    server = ScriptedServer(overloaded=1)
    async with running(server, silence_s=1.5) as clients:
        replicas = Replicas(clients, patience_s=1)
        assert (await replicas.generate(REQUEST)).ids == [7, 9]
        server.overloaded = 5
        with pytest.raises(OverloadedError, match="429"):
            await replicas.generate(REQUEST)
        assert server.overloaded == 3


@pytest.mark.parametrize("reason", [None, "abort", "error"])
async def test_a_completion_that_was_broken_off_is_no_answer(reason: str | None) -> None:
    async def cut(_: ScriptedServer, response: web.StreamResponse, body: dict[str, Any]) -> None:
        choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": reason}
        await send(response, {"choices": [choice | {"delta": {"content": "Your order"}}]})

    async with running(ScriptedServer(cut)) as (client,):
        with pytest.raises(EngineError, match="it is incomplete"):
            await client.generate(REQUEST)
        with pytest.raises(EngineError, match="it is incomplete"):
            await client.chat_text([{"role": "user", "content": "Hi"}], [], temperature=0, max_tokens=5, seed=0)


async def test_no_engine_left_is_an_engine_error_that_names_each() -> None:
    servers = [ScriptedServer(healthy=False), ScriptedServer(healthy=False)]
    async with running(*servers) as clients:
        with pytest.raises(EngineError, match=f"{servers[0].url}.*"):
            await Replicas(clients, patience_s=0.0).generate(REQUEST)


async def test_an_adapter_is_loaded_on_every_engine_and_again_on_one_that_lost_it() -> None:
    servers = [ScriptedServer(), ScriptedServer()]
    async with running(*servers) as clients:
        replicas = Replicas(clients)
        await replicas.load_adapter("skill@v1+abc", Path("/adapters/skill"))
        assert [server.adapters for server in servers] == [{"skill@v1+abc"}] * 2
        first = next(server for server in servers if server.url == preferred([s.url for s in servers], "x"))
        first.adapters.clear()  # as after a restart
        request = Request([1], Sampling(), "skill@v1+abc")
        await replicas.generate(request, "x")
        await replicas.load_adapter("other@v1", Path("/adapters/other"))
        assert first.adapters == {"skill@v1+abc", "other@v1"}
        await replicas.unload_adapter("skill@v1+abc")
        assert [server.adapters for server in servers] == [{"other@v1"}] * 2
        with pytest.raises(UnknownModelError):
            await replicas.generate(request, "x")


async def test_an_engine_that_does_not_list_an_adapter_is_refused() -> None:
    async with running(ScriptedServer(forgets_adapters=True)) as clients:
        with pytest.raises(RequestError, match="does not list it"):
            await Replicas(clients).load_adapter("skill@v1", Path("/adapters/skill"))


async def test_a_token_policy_renders_and_parses_itself() -> None:
    tokenizer = tiny.tokenizer()
    server = ScriptedServer()
    async with running(server) as clients:
        policy = TokenPolicy(Replicas(clients), ChatFormat(tokenizer), None, max_length=200, max_tokens=50)
        completion = await policy.complete([{"role": "user", "content": "count"}], [], seed=3)
        assert completion.prompt_ids == server.bodies[0]["prompt"]
        assert completion.completion_ids == [7, 9]
        short_policy = TokenPolicy(Replicas(clients), ChatFormat(tokenizer), None, max_length=2)
        with pytest.raises(ContextLengthError, match="the context holds 2"):
            await short_policy.complete([{"role": "user", "content": "count"}], [], seed=3)


async def test_a_chat_policy_joins_streamed_tool_calls() -> None:
    async def call(_: ScriptedServer, response: web.StreamResponse, body: dict[str, Any]) -> None:
        parts: list[dict[str, Any]] = [
            {"content": "Let me "},
            {"content": "look."},
            {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "find", "arguments": '{"id"'}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        ]
        for part in parts:
            await send(response, {"choices": [{"delta": part}]})
        await send(response, {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})

    async with running(ScriptedServer(call)) as clients:
        completion = await ChatPolicy(Replicas(clients)).complete([{"role": "user", "content": "count"}], [], seed=3)
    function = {"name": "find", "arguments": '{"id": 1}'}
    calls = [{"id": "c1", "type": "function", "function": function}]
    assert completion.message == {"role": "assistant", "content": "Let me look.", "tool_calls": calls}
    assert completion.finish_reason == "tool_calls"
