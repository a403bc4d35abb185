"""One request to an engine and its answer back to the client, byte for byte.

Invariants: of the body only ``model`` is changed, and only where the engine calls it otherwise; status, content type,
Retry-After and the engine's own headers are kept, and its errors are in OpenAI's form (``engine_errors``); a client
that hangs up ends the engine's work. Another engine is asked only while the client has got nothing and the first cannot
have begun: it refused the connection, or it has lost the adapter. What was answered is kept for the record before the
client has the end of it.
How it fails: a stream that breaks off ends with an error event and without ``[DONE]``, so that no client takes it for
whole. Not covered: which model (``app``), what becomes of the record (``spool``).

Answers in the shadow: what a version on trial would have said, recorded and never shown.

Invariants: a client waits for no shadow; at most ``most`` are asked at once, and only while half of the places at the
engines are free, so that answers come first: what is beyond that is left out and counted. A shadow is asked for what
its request asked for, but not as a stream, and is recorded as an exchange of its own (``shadow_of``).
How it fails: as a record with the engine's status. Not covered: tools, which nobody runs for a shadow: the next request
of the conversation follows the answer that was shown.
"""

import asyncio
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from aiohttp import web

from store.repositories.serving import ROUTED
from traced.gateway.access import Gate
from traced.gateway.engines import Pool, Replica
from traced.gateway.errors import Refusal, in_openais_form
from traced.gateway.upstream import Answer, BrokenOff, Unreachable, Upstream
from traced.inference.client import BASE

KEPT = ("retry-after", "x-request-id")
KEPT_PREFIXES = ("openai-", "x-ratelimit-")
UNAVAILABLE = "engine_unavailable"
MODEL = re.compile(rb'("model"\s*:\s*)("(?:[^"\\]|\\.)*")')
ESCAPED = b"\\u006"  # how every escaped letter of "model" begins: the request's own key may be spelt so
END = b"\ndata: [DONE]"  # an event of its own; inside an event a line's end is escaped
BROKE_OFF = "the engine broke off"


class ClientGone(ConnectionResetError):
    """The client closed its connection while it was answered; nobody's fault behind us."""


@dataclass
class Asked:
    """A request on its way: what is asked of which model, and what went back to the client.

    ``keep`` is called once, when the answer is complete or has failed, before the client has the end of it.
    """

    request: web.Request
    conversation_id: str
    model: str
    raw: bytes
    body: Mapping[str, Any]
    headers: dict[str, str]
    keep: Callable[["Asked"], None]
    shadow_of: str | None = None
    id: str = field(default_factory=lambda: f"{ROUTED}{secrets.token_hex(16)}")
    status: int = 0
    streamed: bool = False
    answer: bytearray = field(default_factory=bytearray)
    detail: str = ""
    began: float = field(default_factory=time.perf_counter)
    _kept: bool = False

    def ended(self, status: int | None = None, detail: str = "") -> None:
        """It is over; ``status`` and ``detail`` where it failed."""
        if not self._kept:
            self._kept = True
            self.status, self.detail = status or self.status, detail or self.detail
            self.keep(self)

    def take(self, chunk: bytes) -> None:
        """A piece of the answer has come."""
        self.answer += chunk


@dataclass(frozen=True)
class Forwarder:
    """Passes requests on to the pool's engines."""

    pool: Pool
    upstream: Upstream

    async def forward(self, asked: Asked) -> web.StreamResponse:
        """Ask an engine and pass its answer on. Raises ``Refusal`` where none answers."""
        tried: set[str] = set()
        while True:
            replica = self.pool.pick(asked.model, asked.conversation_id)
            if replica is None or replica.url in tried:
                raise Refusal(503, f"no engine serves {asked.model!r} now", code=UNAVAILABLE, retry_after=2)
            tried.add(replica.url)
            try:
                with replica.request(asked.model):
                    if (answered := await self._ask(replica, asked)) is not None:
                        return answered
            except Unreachable as error:
                replica.failed(str(error))
            except BrokenOff as error:
                raise Refusal(502, f"{BROKE_OFF}: {error}", code="engine_error", retry_after=1) from error

    async def _ask(self, replica: Replica, asked: Asked) -> web.StreamResponse | None:
        """The answer; None where the engine has lost the adapter."""
        text = with_model(asked.raw, asked.body, replica.upstream(asked.model))
        answer = await self.upstream.post(replica.url, asked.request.path, text)
        try:
            asked.status, asked.streamed = answer.status, answer.content_type == "text/event-stream"
            headers = {**asked.headers, **_kept(answer)}
            if asked.streamed:
                return await _stream(asked, answer, headers)
            whole = await answer.read()
            if answer.status == HTTPStatus.NOT_FOUND and asked.model != BASE and asked.model.encode() in whole:
                replica.loaded.discard(asked.model)  # it was started anew, and gets it again at the next look
                return None
            if answer.status >= HTTPStatus.BAD_REQUEST:
                whole, headers["Content-Type"] = in_openais_form(answer.status, whole), "application/json"
            asked.take(whole)
            asked.ended()
            return web.Response(status=answer.status, body=whole, headers=headers)
        finally:
            answer.close()


async def _stream(asked: Asked, answer: Answer, headers: dict[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, headers=headers)
    try:
        await _pass_on(asked, answer, response)
    except ConnectionResetError as error:
        raise ClientGone(str(error)) from error
    return response


async def _pass_on(asked: Asked, answer: Answer, response: web.StreamResponse) -> None:
    await response.prepare(asked.request)
    while True:
        try:
            chunk = await answer.chunk()
        except BrokenOff as error:
            broken = Refusal(502, f"{BROKE_OFF}: {error}", code="engine_error")
            asked.ended(broken.status, broken.message)
            await response.write(b"data: " + broken.body() + b"\n\n")
            return
        if not chunk:
            asked.ended()
            return
        asked.take(chunk)
        if END in asked.answer[-len(chunk) - len(END) :]:
            asked.ended()
        await response.write(chunk)


def with_model(raw: bytes, body: Mapping[str, Any], model: str) -> bytes:
    """A request for ``model``: its bytes as they came but for that, where it is plain what to change."""
    if body["model"] == model:
        return raw
    found = MODEL.findall(raw)
    if len(found) == 1 and ESCAPED not in raw and json.loads(found[0][1]) == body["model"]:
        return MODEL.sub(lambda match: match[1] + json.dumps(model).encode(), raw)
    return json.dumps({**json.loads(raw), "model": model}, separators=(",", ":")).encode()


def _kept(answer: Answer) -> dict[str, str]:
    kept = {"Content-Type": answer.header("content-type") or "application/json"}
    for name, value in answer.headers:
        if name in KEPT or name.startswith(KEPT_PREFIXES):
            kept[name] = value
    return kept


OK, FAILED = 200, 502
GONE = 499


@dataclass
class Shadows:
    """Asks for shadows; ``left_out`` counts those that there was no room for."""

    pool: Pool
    upstream: Upstream
    gate: Gate
    most: int
    left_out: int = 0
    _running: set["asyncio.Task[None]"] = field(default_factory=set)

    def follow(self, asked: Asked, model: str) -> None:
        """Ask ``model`` as well what was ``asked`` and answered."""
        if asked.status != OK:
            return
        if len(self._running) >= self.most or 2 * self.gate.running > self.gate.concurrency:
            self.left_out += 1
            return
        task = asyncio.create_task(self._ask(asked, model))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def end(self) -> None:
        """Give up those that run."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _ask(self, asked: Asked, model: str) -> None:
        replica = self.pool.pick(model, asked.conversation_id)
        if replica is None:
            self.left_out += 1
            return
        body = {**json.loads(asked.raw), "model": replica.upstream(model), "stream": False}
        body.pop("stream_options", None)
        shadow = Asked(
            asked.request, asked.conversation_id, model, json.dumps(body).encode(), body, {}, asked.keep, asked.id
        )
        try:
            with replica.request(model):
                answer = await self.upstream.post(replica.url, asked.request.path, shadow.raw)
                try:
                    shadow.status = answer.status
                    shadow.take(await answer.read())
                finally:
                    answer.close()
            shadow.ended()
        except (Unreachable, BrokenOff) as error:
            shadow.ended(FAILED, str(error))
        except asyncio.CancelledError:
            shadow.ended(GONE, "the router ended")
            raise
