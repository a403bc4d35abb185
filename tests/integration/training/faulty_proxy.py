"""A proxy before an engine that sends completions to another model than the request names, as a faulty engine would."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

LOAD, UNLOAD, COMPLETE = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
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


@contextlib.contextmanager
def faulty_proxy(target: str, redirect: Redirection) -> Iterator[str]:
    """Run a proxy on a thread; yields its URL."""
    loop = asyncio.new_event_loop()
    proxy = FaultyProxy(target, redirect)
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
                async with session.post(target + UNLOAD, json={"lora_name": name}):
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
