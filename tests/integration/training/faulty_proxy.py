"""Proxies before an engine: one that sends completions to another model than the request names, one that sleeps."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

LOAD, UNLOAD, COMPLETE = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
EVENTS = {LOAD: "load", UNLOAD: "unload", COMPLETE: "sample", "/sleep": "sleep", "/wake_up": "wake"}
Redirection = Callable[[str, list[str]], str]


@dataclass
class FaultyProxy:
    """Passes requests on to ``target``; adapters stay loaded there, so that a stale one can answer.

    Args:
        redirect: Gets the model of a completion request and the adapters loaded so far; returns the model that answers.
    """

    target: str
    redirect: Redirection
    adapters: list[str] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json() if request.can_read_body else {}
        if request.path == LOAD:
            self.adapters.append(body["lora_name"])
        elif request.path == UNLOAD:
            return web.Response(text="ok")
        elif request.path == COMPLETE:
            body["model"] = self.redirect(body["model"], self.adapters)
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self.target + request.path, json=body or None) as response,
        ):
            content = await response.read()
            return web.Response(body=content, status=response.status, content_type=response.content_type)


def to_requested(model: str, adapters: list[str]) -> str:
    """Let the model answer that the request names."""
    return model


@dataclass
class SleepingProxy(FaultyProxy):
    """Speaks vLLM's sleep protocol for an engine that has no sleep mode, and records what happens in which order.

    Args:
        events: "load", "unload", "sample", "sleep" and "wake", each with whether the engine sleeps when it comes.
        on_sleep: Is called once the engine sleeps.
    """

    redirect: Redirection = to_requested
    events: list[tuple[str, bool]] = field(default_factory=list)
    on_sleep: Callable[[], None] = lambda: None
    is_asleep: bool = False

    def record(self, name: str) -> None:
        """Add an event, unless it is the same as the last one."""
        if self.events[-1:] != [(name, self.is_asleep)]:
            self.events.append((name, self.is_asleep))

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path
        if path in EVENTS:
            self.record(EVENTS[path])
        if path == "/is_sleeping":
            return web.json_response({"is_sleeping": self.is_asleep})
        if path == "/metrics":
            return web.Response(text=f'vllm:engine_sleep_state{{sleep_state="awake"}} {float(not self.is_asleep)}\n')
        if path in ("/sleep", "/wake_up"):
            assert self.is_asleep == (path == "/wake_up")
            self.is_asleep = path == "/sleep"
            if self.is_asleep:
                self.on_sleep()
            return web.Response()
        return await super().handle(request)


def faulty_proxy(target: str, redirect: Redirection) -> contextlib.AbstractContextManager[str]:
    """Run a proxy that redirects; yields its URL."""
    return running(FaultyProxy(target, redirect))


@contextlib.contextmanager
def running(proxy: FaultyProxy) -> Iterator[str]:
    """Run a proxy on a thread; yields its URL."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", proxy.handle)
    runner = web.AppRunner(app)

    async def start() -> str:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def stop() -> None:
        await runner.cleanup()
        async with aiohttp.ClientSession() as session:
            for name in proxy.adapters:
                async with session.post(proxy.target + UNLOAD, json={"lora_name": name}):
                    pass

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
