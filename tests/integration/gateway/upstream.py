"""An engine that does on demand what a real one does seldom: loses adapters, refuses, breaks off, is slow, dies.

It speaks vLLM's dialect and signs every answer with the model that gave it.
"""

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.waiting import eventually_async
from traced.inference.embedded import anthropic, responses

BASE = "Qwen/some-base"


@dataclass
class Slots:
    """vLLM's places for adapters with the fault of its issue 47724: a load takes the place that was least lately used,
    also under a request that still runs, which goes on with the weights that are there then. Unloading frees none.
    """

    number: int
    names: list[str] = field(default_factory=list)  # by place
    used: list[int] = field(default_factory=list)
    running: Counter[int] = field(default_factory=Counter)
    clock: int = 0

    def activate(self, name: str) -> int:
        """The place of an adapter, which it gets now if it has none."""
        self.clock += 1
        for place, count in self.running.items():  # every step of a running request touches its adapter
            if count:
                self.used[place] = self.clock
        if name not in self.names:
            if len(self.names) < self.number:
                self.names.append("")
                self.used.append(0)
                place = len(self.names) - 1
            else:
                place = min(range(self.number), key=lambda place: self.used[place])
            self.names[place] = name
        place = self.names.index(name)
        self.used[place] = self.clock
        return place


@dataclass
class Upstream:
    """What it has loaded, what it was asked, and how it behaves; ``label`` is the letter that it decides for."""

    adapters: dict[str, str] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)  # of requests in other forms than chat
    started: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    slow: dict[str, float] = field(default_factory=dict)  # seconds of one model
    label: str = "A"
    fixed_text: str = ""  # instead of its signature
    status: int = 200
    delay_s: float = 0.0
    waits_for: str = ""  # a folder: no answer ends until it has a file named as ``fixed_text``
    routing_delay_s: float = 0.0
    break_after: int | None = None  # pieces of a stream
    stays_open: bool = False  # after the last event of a stream
    loads: list[str] = field(default_factory=list)
    most_loaded: int = 0
    hung_up: int = 0
    running: int = 0
    refuses_loads: bool = False
    refusals: list[str] = field(default_factory=list)
    health_delay_s: float = 0.0
    knows_responses: bool = True
    words: list[str] = field(default_factory=list)  # of a stream, where not its signature
    letters_a_token: int = 1
    awake: asyncio.Event = field(default_factory=asyncio.Event)  # cleared once it is asked to sleep
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    decoding: int = 0
    asleep: bool = False
    faults: int = 0  # wake-ups while it completed requests, which vLLM does not survive
    sleeps: list[int] = field(default_factory=list)  # requests that ran when it was put to sleep
    refuses_sleep: bool = False
    refuses_wake: bool = False
    wakes: int = 0
    wake_delay_s: float = 0.0
    ill: bool = False  # fails /health
    slots: "Slots | None" = None
    reports_adapters: bool = True  # with which adapters requests run, in /metrics
    running_adapters: Counter[str] = field(default_factory=Counter)
    reports: dict[str, float] = field(default_factory=dict)  # when they were the latest, as vLLM keeps them
    load_locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        """Listen; a restart on the same port has no adapters."""
        app = web.Application()
        self.wake()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/sleep", self._sleep)
        app.router.add_get("/is_sleeping", self._is_sleeping)
        app.router.add_post("/wake_up", self._wake_up)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/responses", self._respond)
        app.router.add_post("/v1/messages", self._message)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def fall_asleep(self) -> None:
        """Sleep, as if a training had asked for it."""
        self.awake.clear()
        self.asleep = True
        self.sleeps.append(self.decoding)

    def wake(self) -> None:
        """Take requests again."""
        self.asleep = False
        self.awake.set()

    async def stop(self) -> None:
        """Be gone, adapters and all."""
        assert self._runner is not None
        await self._runner.cleanup()
        self.adapters.clear()

    async def reset(self) -> None:
        """Come back at the same place."""
        await self.start(int(self.url.rpartition(":")[2]))

    async def _health(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.health_delay_s)
        return web.Response(status=503 if self.ill else 200)

    async def _models(self, request: web.Request) -> web.Response:
        data: list[dict[str, Any]] = [{"id": name, "parent": BASE} for name in self.adapters]
        return web.json_response({"data": [*data, {"id": BASE, "parent": None}]})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.refuses_loads:
            self.refusals.append(body["lora_name"])
            return web.json_response({"error": {"message": "no room"}}, status=500)
        name = body["lora_name"]
        async with self.load_locks[name]:
            if name in self.adapters:
                return _refusal(400, f"The lora adapter '{name}' has already been loaded. If you want to ...")
            self.loads.append(name)
            await asyncio.sleep(0.05)
            if self.slots is not None:
                self.slots.activate(name)
            self.adapters[name] = body["lora_path"]
        self.most_loaded = max(self.most_loaded, len(self.adapters))
        return web.Response(text="Success")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if name not in self.adapters:
            return _refusal(404, f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name]
        return web.Response(text="Success")

    async def _complete(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.routing_delay_s)
        top = {self.label: -0.1, " other": -3.0}
        return web.json_response({"id": "cmpl-1", "choices": [{"text": "x", "logprobs": {"top_logprobs": [top]}}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        step = self.letters_a_token
        return web.json_response({"tokens": [hash(text[i : i + step]) for i in range(0, len(text), step)]})

    async def _sleep(self, request: web.Request) -> web.Response:
        if self.refuses_sleep:
            return web.json_response({"error": {"message": "no sleep mode"}}, status=500)
        self.awake.clear()
        if self.decoding:
            self.drained.clear()
            await self.drained.wait()
        self.fall_asleep()
        return web.json_response({"status": "sleeping"})

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": not self.awake.is_set()})

    async def _metrics(self, request: web.Request) -> web.Response:
        labels = 'engine="0",model_name="base",sleep_state="awake"'
        text = f"# HELP x\nvllm:engine_sleep_state{{{labels}}} {float(not self.asleep)}\n"
        if self.reports_adapters:
            self.reports[",".join(name for name, count in self.running_adapters.items() if count)] = time.time()
            for names, at in self.reports.items():
                labels = f'max_lora="1",running_lora_adapters="{names}",waiting_lora_adapters=""'
                text += f"vllm:lora_requests_info{{{labels}}} {at!r}\n"
        return web.Response(text=text)

    async def _wake_up(self, request: web.Request) -> web.Response:
        if self.refuses_wake:
            return web.json_response({"error": {"message": "CUDA out of memory"}}, status=500)
        self.faults += not self.asleep
        await asyncio.sleep(self.wake_delay_s)
        self.wake()
        self.wakes += 1
        return web.json_response({"status": "awake"})

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        if not self.knows_responses:
            raise web.HTTPNotFound
        return await self._say_in(responses.ResponsesRequest, responses.event_lines, request)

    async def _message(self, request: web.Request) -> web.StreamResponse:
        return await self._say_in(anthropic.MessagesRequest, anthropic.event_lines, request)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        return web.json_response({"input_tokens": 5})

    async def _say_in(self, form: Any, event_lines: Any, request: web.Request) -> web.StreamResponse:
        """Give an answer in another form: a call of the first tool, except after its result."""
        raw, body = await request.read(), await request.json()
        self.bodies.append(raw)
        self.requests.append(body)
        if body["model"] not in (BASE, *self.adapters):
            return web.json_response({"error": {"message": "The model does not exist.", "code": 404}}, status=404)
        if self.status != 200:
            return web.json_response({"error": {"message": "slow down", "code": self.status}}, status=self.status)
        self.answers[body["model"]] += 1
        number = sum(self.answers.values())
        message: dict[str, Any] = {"role": "assistant", "content": f"signed {body['model']}"}
        if body.get("tools") and b"function_call_output" not in raw and b"tool_result" not in raw:
            function = {"name": body["tools"][0]["name"], "arguments": '{"order_id": "W7"}'}
            message |= {"tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}]}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        answer = form.model_validate(body).response({"id": "x", "created": 1, "usage": usage, "choices": [choice]})
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for place, line in enumerate(event_lines(answer)):
            if place == self.break_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            # In two pieces, as they may come over a network.
            await response.write(line[:20].encode())
            await asyncio.sleep(self.delay_s)
            await response.write(line[20:].encode())
        if self.stays_open:
            await asyncio.sleep(30)
        return response

    async def _be_released(self) -> None:
        if self.waits_for:
            await eventually_async(Path(self.waits_for, self.fixed_text).exists)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.running += 1
        try:
            await self.awake.wait()  # vLLM queues requests while it sleeps
            self.requests.append(body)
            if body["model"] not in (BASE, *self.adapters):
                return _refusal(404, f"The model `{body['model']}` does not exist.")
            self.decoding += 1
            try:
                return await self._say(request, body, await self._decode(body["model"]))
            finally:
                self.decoding -= 1
                if not self.decoding:
                    self.drained.set()
        except (asyncio.CancelledError, ConnectionResetError):
            self.hung_up += 1
            raise
        finally:
            self.running -= 1

    async def _decode(self, model: str) -> str:
        """Take the time of an answer; returns whose weights gave it."""
        self.started[model] += 1
        if self.slots is None or model not in self.adapters:
            await asyncio.sleep(self.slow.get(model, self.delay_s))
            return model
        place = self.slots.activate(model)
        self.slots.running[place] += 1
        self.running_adapters[model] += 1
        try:
            await asyncio.sleep(self.delay_s)
            return self.slots.names[place]
        finally:
            self.slots.running[place] -= 1
            self.running_adapters[model] -= 1

    async def _say(self, request: web.Request, body: dict[str, Any], model: str) -> web.StreamResponse:
        if self.status != 200:
            error_body = {"error": {"message": "slow down", "type": "rate_limit_error", "code": "busy", "param": None}}
            return web.json_response(error_body, status=self.status, headers={"Retry-After": "7"})
        self.answers[model] += 1
        number = sum(self.answers.values())
        if body.get("stream"):
            return await self._stream(request, model, number)
        await self._be_released()
        message = {"role": "assistant", "content": self.fixed_text or f"signed {model}"}
        usage = {"prompt_tokens": 5, "completion_tokens": 3}
        completion = {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": 1,
            "model": model,
            "usage": usage,
        }
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({**completion, "choices": [choice], "extension": body.get("extension")})

    async def _stream(self, request: web.Request, model: str, number: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        words = self.words or ([self.fixed_text] if self.fixed_text else ["signed", " ", model])
        for place, word in enumerate(words):
            if place == self.break_after:
                assert request.transport is not None
                # vLLM sends the head before the first token is there.
                if not place:
                    await _send_head(response)
                request.transport.abort()
                return response
            delta = {"role": "assistant", "content": word}
            choice = {"index": 0, "delta": delta, "finish_reason": "stop" if place + 1 == len(words) else None}
            event = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": 1, "model": model}
            await response.write(f"data: {json.dumps({**event, 'choices': [choice]})}\n\n".encode())
            await self._be_released()
            await asyncio.sleep(self.delay_s)
        await response.write(b"data: [DONE]\n\n")
        return response


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


async def _send_head(response: web.StreamResponse) -> None:
    assert response._payload_writer is not None
    response._payload_writer.send_headers()
    await asyncio.sleep(0.02)


@asynccontextmanager
async def upstreams(count: int = 1) -> AsyncIterator[list[Upstream]]:
    """So many engines."""
    upstream_list = [Upstream() for _ in range(count)]
    for upstream in upstream_list:
        await upstream.start()
    try:
        yield upstream_list
    finally:
        for upstream in upstream_list:
            await upstream.stop()
