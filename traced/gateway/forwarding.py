"""Forward a request to an engine and its response to the client, byte for byte, and send shadow requests.

Invariants:
- Only ``model`` changes in the body. The status, content type, Retry-After, request id and OpenAI's and rate-limit
  headers of the response are kept.
- If a client disconnects, the engine's work on its request ends.
- Another engine is tried only while the client has received nothing, each engine once: after a refused or broken
  connection, or if the engine has lost the adapter. A silent engine may still work on the request: no other is tried.
- An exchange is recorded before the client has received the end of the response.
- A stream that breaks off ends with an error event and without ``[DONE]``.
- A client never waits for a shadow request.

Not covered: tool calls in shadow responses are not executed.
"""

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from aiohttp import web

from store.repositories.serving import EXCHANGE_PREFIX
from traced.gateway.access import ConcurrencyLimit
from traced.gateway.circuit_breaker import Attempt
from traced.gateway.engines import Pool, Replica
from traced.gateway.errors import Refusal, error_message, to_anthropic_error, to_openai_error
from traced.gateway.upstream import (
    ConnectionLost,
    EngineResponse,
    EngineSilent,
    EngineUnavailable,
    EngineUnreachable,
    Upstream,
)
from traced.inference.client import BASE
from traced.ingest.responses import FORMS, LAST_EVENTS, Form

FORWARDED_HEADERS = ("retry-after", "x-request-id")
FORWARDED_PREFIXES = ("openai-", "x-ratelimit-")
UNAVAILABLE, ENGINE_ERROR = "engine_unavailable", "engine_error"
# Of an engine that takes no requests, or of the proxy before an engine that is not there.
UNAVAILABLE_STATUSES = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)
MODEL = re.compile(rb'("model"\s*:\s*)("(?:[^"\\]|\\.)*")')
# The beginning of every escaped letter of "model"; a key of the request may be written with escapes.
ESCAPED = b"\\u006"
# The beginnings of the last events of a stream in each form. Line ends inside an event are escaped.
END_MARKS = (b"\ndata: [DONE]", b"\nevent: message_stop", *(f"\nevent: {name}\n".encode() for name in LAST_EVENTS))
MARK_LENGTH = max(map(len, END_MARKS))
CONNECTION_LOST = "the engine closed the connection"
# nginx's status for a client that closed the connection.
CLIENT_CLOSED = 499
log = logging.getLogger(__name__)


class ClientDisconnected(ConnectionResetError):
    """The client closed its connection during the response."""


def new_exchange_id() -> str:
    """Return a new random id of an exchange."""
    return f"{EXCHANGE_PREFIX}{secrets.token_hex(16)}"


class _BrokenStream(ConnectionLost):
    """The engine broke off after the client had received a part of the response."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__(CONNECTION_LOST)
        self.response = response


@dataclass
class PendingExchange:
    """A request, the model that serves it, and the response sent to the client so far.

    Args:
        record: Called once when the response is complete or has failed, before its end is sent to the client.
        settle: Awaited between ``record`` and the end of a complete response.
        shadow_of: The id of the exchange that this one shadows.
        first_byte_at: Value of ``time.perf_counter`` when the first byte of the response was there; 0 before.
        failure: How the last engine broke off the connection.
        failed_urls: The engines that broke off the connection or refused it; they get this request only once.
    """

    request: web.Request
    conversation_id: str
    model: str
    raw: bytes
    body: Mapping[str, object]
    headers: dict[str, str]
    record: Callable[["PendingExchange"], None]
    settle: "Callable[[], Awaitable[None]] | None" = None
    shadow_of: str | None = None
    id: str = field(default_factory=new_exchange_id)
    status: int = 0
    streamed: bool = False
    answer: bytearray = field(default_factory=bytearray)
    detail: str = ""
    first_byte_at: float = 0.0
    failure: ConnectionLost | EngineUnavailable | None = None
    failed_urls: set[str] = field(default_factory=set)
    started: float = field(default_factory=time.perf_counter)
    _is_recorded: bool = False
    _is_ending: bool = False

    def finish(self, status: int | None = None, detail: str = "") -> None:
        """Record the exchange once; ``status`` and ``detail`` describe a failure."""
        if not self._is_recorded:
            self._is_recorded = True
            self.status, self.detail = status or self.status, detail or self.detail
            self.record(self)

    async def complete(self) -> None:
        """Record the complete exchange, before the client has its end."""
        is_first = not self._is_recorded
        self.finish()
        if is_first and self.settle is not None:
            await self.settle()

    def append(self, chunk: bytes) -> None:
        """Add a chunk of the response."""
        self.first_byte_at = self.first_byte_at or time.perf_counter()
        self.answer += chunk

    def ends_with(self, chunk: bytes) -> bool:
        """Whether a stream is complete with this chunk, the last one of ``answer``."""
        # The beginning of the last event may be split over two chunks.
        tail = self.answer[-len(chunk) - MARK_LENGTH :]
        self._is_ending = self._is_ending or any(mark in tail for mark in END_MARKS)
        return self._is_ending and self.answer.endswith(b"\n\n")


@dataclass(frozen=True)
class Forwarder:
    """Forwards requests to the pool's engines."""

    pool: Pool
    upstream: Upstream

    async def forward(self, exchange: PendingExchange) -> web.StreamResponse:
        """Send the request to an engine and its response to the client.

        Raises:
            Refusal: 503 if no engine serves the model, 502 if all that do broke off the connection before they
                answered, 502 or 503 if that was the last one's answer, 504 if an engine sent nothing for too long.
            ClientDisconnected: The client closed its connection during a stream.
        """
        tried_urls = set(exchange.failed_urls)
        while True:
            replica = self.pool.pick(exchange.model, exchange.conversation_id, tried_urls)
            if replica is None and exchange.failure is not None:
                raise _engine_error(exchange.failure)
            if replica is None:
                raise Refusal(
                    503, f"no engine serves {exchange.model!r} at the moment", code=UNAVAILABLE, retry_after=2
                )
            tried_urls.add(replica.url)
            try:
                with replica.request(exchange.model) as attempt:
                    if (response := await self._send(replica, exchange, attempt)) is not None:
                        return response
            except EngineUnreachable as error:
                exchange.failed_urls.add(replica.url)
                replica.mark_failed(str(error))
            except _BrokenStream as error:
                return error.response
            except EngineSilent as error:
                raise Refusal(504, f"the engine does not answer: {error}", code="engine_timeout") from error
            except (ConnectionLost, EngineUnavailable) as error:
                exchange.failed_urls.add(replica.url)
                exchange.failure = error
                log.warning("engine %s failed the request %s: %s", replica.url, exchange.id, error)

    async def _send(self, replica: Replica, exchange: PendingExchange, attempt: Attempt) -> web.StreamResponse | None:
        """Return the response, or None if the engine has lost the adapter."""
        body = with_model(exchange.raw, exchange.body, replica.upstream(exchange.model))
        answer = await self.upstream.post(replica.url, exchange.request.path, body)
        try:
            exchange.status, exchange.streamed = answer.status, answer.content_type == "text/event-stream"
            headers = {**exchange.headers, **_forwarded_headers(answer)}
            if exchange.streamed:
                # Engines send the head before the first token. Until the client has received anything, the request
                # can be tried elsewhere.
                chunk = await answer.chunk()
                attempt.note_response()
                response = await _stream(exchange, answer, headers, chunk)
                attempt.succeed()
                return response
            content = await answer.read()
            if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                attempt.succeed()
            is_missing = answer.status == HTTPStatus.NOT_FOUND and exchange.model != BASE
            # The engine was restarted; the pool loads the adapter again at its next check.
            if is_missing and exchange.model.encode() in content:
                replica.loaded.discard(exchange.model)
                return None
            if answer.status >= HTTPStatus.BAD_REQUEST:
                if answer.status in UNAVAILABLE_STATUSES:
                    raise EngineUnavailable(
                        answer.status, error_message(answer.status, content), answer.header("retry-after")
                    )
                content, headers["Content-Type"] = to_openai_error(answer.status, content), "application/json"
            exchange.append(content)
            await exchange.complete()
            return web.Response(status=answer.status, body=content, headers=headers)
        finally:
            answer.close()


@dataclass
class Shadows:
    """Sends each request of a shadow trial also to the version on trial; its responses are recorded but never returned.

    Args:
        limit: The limit of client requests; shadow requests run only while half of its slots are free.
        max_running: Maximum number of concurrent shadow requests.
        skipped: The number of shadow requests that were not sent.
    """

    pool: Pool
    upstream: Upstream
    limit: ConcurrencyLimit
    max_running: int
    skipped: int = 0
    _running: set["asyncio.Task[None]"] = field(default_factory=set)

    def start(self, exchange: PendingExchange, model: str) -> None:
        """Send the request of a successful exchange to ``model`` too, without waiting for the response."""
        if exchange.status != HTTPStatus.OK:
            return
        # Shadow requests must not delay clients.
        if len(self._running) >= self.max_running or 2 * self.limit.running > self.limit.concurrency:
            self.skipped += 1
            return
        task = asyncio.create_task(self._send(exchange, model))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def cancel_all(self) -> None:
        """Cancel the running shadow requests."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _send(self, exchange: PendingExchange, model: str) -> None:
        replica = self.pool.pick(model, exchange.conversation_id)
        if replica is None:
            self.skipped += 1
            return
        body = {**json.loads(exchange.raw), "model": replica.upstream(model), "stream": False}
        body.pop("stream_options", None)
        shadow = PendingExchange(
            exchange.request,
            exchange.conversation_id,
            model,
            json.dumps(body).encode(),
            body,
            {},
            exchange.record,
            shadow_of=exchange.id,
        )
        try:
            with replica.request(model) as attempt:
                answer = await self.upstream.post(replica.url, exchange.request.path, shadow.raw)
                try:
                    shadow.status = answer.status
                    shadow.append(await answer.read())
                    attempt.succeed()
                finally:
                    answer.close()
            shadow.finish()
        except (EngineUnreachable, ConnectionLost) as error:
            shadow.finish(HTTPStatus.BAD_GATEWAY, str(error))
        except asyncio.CancelledError:
            shadow.finish(CLIENT_CLOSED, "the router stopped")
            raise


def with_model(raw: bytes, body: Mapping[str, object], model: str) -> bytes:
    """Return the request with another ``model``.

    The other bytes stay the same if the field to replace is unambiguous; otherwise the JSON is written again.
    """
    if body["model"] == model:
        return raw
    matches = MODEL.findall(raw)
    if len(matches) == 1 and ESCAPED not in raw and json.loads(matches[0][1]) == body["model"]:
        return MODEL.sub(lambda match: match[1] + json.dumps(model).encode(), raw)
    return json.dumps({**json.loads(raw), "model": model}, separators=(",", ":")).encode()


def _engine_error(error: ConnectionLost | EngineUnavailable) -> Refusal:
    if isinstance(error, EngineUnavailable):
        return Refusal(
            error.status, f"the engine takes no request: {error}", code=UNAVAILABLE, retry_after=error.retry_after
        )
    return Refusal(502, f"{CONNECTION_LOST}: {error}", code=ENGINE_ERROR, retry_after=1)


async def _stream(
    exchange: PendingExchange, answer: EngineResponse, headers: dict[str, str], chunk: bytes
) -> web.StreamResponse:
    """Send the stream that begins with ``chunk`` to the client; raises ``_BrokenStream``."""
    response = web.StreamResponse(status=answer.status, headers=headers)
    try:
        await response.prepare(exchange.request)
        while chunk:
            exchange.append(chunk)
            # Record before the chunk with the end of the last event is sent.
            if exchange.ends_with(chunk):
                await exchange.complete()
            await response.write(chunk)
            try:
                chunk = await answer.chunk()
            except ConnectionLost as error:
                refusal = _engine_error(error)
                exchange.finish(refusal.status, refusal.message)
                await response.write(_error_event(exchange, refusal))
                raise _BrokenStream(response) from error
        await exchange.complete()
    except ConnectionResetError as error:
        raise ClientDisconnected(str(error)) from error
    return response


def _error_event(exchange: PendingExchange, refusal: Refusal) -> bytes:
    if FORMS.get(exchange.request.path) is Form.ANTHROPIC:
        return b"event: error\ndata: " + to_anthropic_error(refusal.status, refusal.body()) + b"\n\n"
    return b"data: " + refusal.body() + b"\n\n"


def _forwarded_headers(answer: EngineResponse) -> dict[str, str]:
    headers = {"Content-Type": answer.header("content-type") or "application/json"}
    for name, value in answer.headers:
        if name in FORWARDED_HEADERS or name.startswith(FORWARDED_PREFIXES):
            headers[name] = value
    return headers
