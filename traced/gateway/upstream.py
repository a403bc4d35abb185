"""HTTP/1.1 requests to engines over kept-alive connections.

The client is built on httptools, because aiohttp's client took more than half of the time that the gateway adds to a
request.

Invariants: a connection carries one request at a time and is reused only after the whole response was read; closing an
unfinished response closes its connection, which ends the engine's work; reading from the engine pauses when more than
``READ_AHEAD`` bytes are buffered for a slow reader. Errors: ``EngineUnreachable`` if nothing was sent, ``EngineSilent``
if nothing was received for too long, ``ConnectionLost`` for everything else. Not covered: redirects, compression,
cookies, HTTP/2.
"""

import asyncio
import ssl
import weakref
from collections import deque
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast
from urllib.parse import urlsplit

import httptools

READ_AHEAD = 2**18
# If the engine closes a reused connection within this time and without a byte, it was closed for idleness: retry.
STALE_S = 1.0
# uvicorn, in the engines, closes an idle connection after five seconds.
IDLE_S = 4.0
# Unless the engine names another time in its header Retry-After.
RETRY_AFTER_S = 2


class EngineUnreachable(Exception):
    """No connection could be made, so the engine has received nothing of the request."""


class ConnectionLost(Exception):
    """The connection ended before the end of the response."""


class EngineSilent(ConnectionLost):
    """The engine sent nothing for too long; it may still work on the request."""


class EngineUnavailable(Exception):
    """The engine, or a proxy before it, answered with status 502 or 503, so it has not worked on the request."""

    def __init__(self, status: int, message: str, retry_after: str = "") -> None:
        super().__init__(f"it answers with status {status}: {message}")
        self.status = status
        self.retry_after = int(retry_after) if retry_after.isdecimal() else RETRY_AFTER_S


class EngineResponse:
    """A response with ``status``, ``headers`` (names in lower case), and a body that is read as it arrives."""

    def __init__(self, connection: "_Connection") -> None:
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    @property
    def content_type(self) -> str:
        """Return the content type without parameters, in lower case."""
        return self.header("content-type").partition(";")[0].strip().lower()

    def header(self, name: str) -> str:
        """Return the first header of this name, or ""."""
        return next((value for header, value in self.headers if header == name), "")

    async def chunk(self) -> bytes:
        """Wait for bytes of the body and return all that have arrived, b"" at its end; raises ``ConnectionLost``."""
        return await self._connection.chunk()

    async def read(self) -> bytes:
        """Return the rest of the body; raises ``ConnectionLost``."""
        body = await self.chunk()
        while chunk := await self.chunk():
            body += chunk
        return body

    def close(self) -> None:
        """Release the connection: it is kept for reuse after a complete response and closed otherwise."""
        self._connection.release()


@dataclass
class Upstream:
    """Keeps the connections to engines, by URL.

    Args:
        key: The bearer token for the engines.
        connect_s: Timeout of a new connection in seconds.
        silence_s: Seconds after which an engine that sends nothing counts as lost.
    """

    key: str = ""
    connect_s: float = 5.0
    silence_s: float = 600.0
    _heads: dict[tuple[str, str], bytes] = field(default_factory=dict)
    _idle: "dict[str, deque[_Connection]]" = field(default_factory=dict)
    _connections: "weakref.WeakSet[_Connection]" = field(default_factory=weakref.WeakSet)
    _is_closed: bool = False

    async def post(self, url: str, path: str, body: bytes) -> EngineResponse:
        """Send JSON and wait for the head of the response; the caller has to close the response.

        Raises:
            EngineUnreachable: No connection could be made; nothing was sent.
            ConnectionLost: An established connection failed; the engine may have started with the request.
        """
        text = b"%b%d\r\n\r\n%b" % (self._head(url, path), len(body), body)
        connection = self._take_idle(url)
        if connection is not None:
            try:
                return await self._send(connection, text)
            except _Stale:
                pass
        try:
            fresh = await self._connect(url)
        except EngineUnreachable as error:
            if connection is None:
                raise
            # The engine may have started with the request that was sent on the stale connection.
            raise ConnectionLost(f"it closed the connection, and a second attempt failed: {error}") from error
        return await self._send(fresh, text)

    async def _send(self, connection: "_Connection", text: bytes) -> EngineResponse:
        try:
            await connection.send(text)
        except BaseException:
            connection.abort()
            raise
        return EngineResponse(connection)

    def close(self) -> None:
        """Close all connections, also those of requests that still run; later requests fail."""
        self._is_closed = True
        for connection in list(self._connections):
            connection.abort()

    def close_idle(self, url: str) -> None:
        """Close the connections to an engine that no request uses, and forget the engine."""
        for connection in self._idle.pop(url, ()):
            connection.abort()
        for key in [key for key in self._heads if key[0] == url]:
            del self._heads[key]

    def _head(self, url: str, path: str) -> bytes:
        head = self._heads.get((url, path))
        if head is None:
            parts = urlsplit(url)
            lines = [f"POST {parts.path}{path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
            lines += ["Content-Type: application/json", "Accept: */*", "Accept-Encoding: identity"]
            lines += [f"Authorization: Bearer {self.key}"] if self.key else []
            head = self._heads[url, path] = ("\r\n".join(lines) + "\r\nContent-Length: ").encode("latin-1")
        return head

    def _take_idle(self, url: str) -> "_Connection | None":
        connections = self._idle.get(url)
        while connections:
            # Take the most recently used connection, so that surplus ones stay idle long enough to be closed.
            connection = connections.pop()
            if connection.is_open and asyncio.get_running_loop().time() - connection.idle_since < IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self, url: str) -> "_Connection":
        parts = urlsplit(url)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        idle = self._idle.setdefault(url, deque())
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop, idle, self.silence_s), parts.hostname or "", port, ssl=secure
                )
        except (OSError, TimeoutError) as error:
            raise EngineUnreachable(f"cannot connect to {url}: {error or 'no answer'}") from error
        self._connections.add(connection)
        if self._is_closed:
            connection.abort()
            raise EngineUnreachable("the router stops")
        return connection


class _Stale(Exception):
    """The engine closed a reused connection before the first byte of the response."""


class _Connection(asyncio.Protocol):
    """One connection to an engine; httptools calls the methods ``on_...``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, idle: "deque[_Connection]", silence_s: float) -> None:
        self._loop, self._idle, self._silence_s = loop, idle, silence_s
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._silence_timer: asyncio.TimerHandle | None = None
        self._wait_started = 0.0
        self._failure = ""
        self._closed_by_engine = self._is_silent = False
        self._completed_responses = 0
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self._chunks: list[bytes] = []
        self._buffered_bytes = 0
        self._has_head = self._is_complete = self._keep_alive = self._is_paused = False
        self._nothing_received = True

    @property
    def is_open(self) -> bool:
        return not self._failure and self._transport is not None and not self._transport.is_closing()

    async def send(self, text: bytes) -> None:
        """Send a request and wait for the head of the response."""
        assert self._transport is not None
        self._reset()
        started = self._loop.time()
        self._transport.write(text)
        while not self._has_head:
            if self._failure:
                closed_at_once = self._closed_by_engine and self._loop.time() - started < STALE_S
                raise (
                    _Stale if self._completed_responses and self._nothing_received and closed_at_once else self._error()
                )
            await self._wait()

    async def chunk(self) -> bytes:
        while not self._chunks:
            if self._is_complete:
                return b""
            if self._failure:
                raise self._error()
            await self._wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered_bytes = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def release(self) -> None:
        if self._is_complete and self._keep_alive and self.is_open and not self._chunks and not self._is_paused:
            self._completed_responses += 1
            self.idle_since = self._loop.time()
            self._idle.append(self)
        else:
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        self._waiter, self._wait_started = self._loop.create_future(), self._loop.time()
        # One timer serves many waits: an asyncio.timeout for each wait took 5 % of the request time.
        if self._silence_timer is None:
            self._silence_timer = self._loop.call_later(self._silence_s, self._check_silence)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _error(self) -> ConnectionLost:
        return EngineSilent(self._failure) if self._is_silent else ConnectionLost(self._failure)

    def _check_silence(self) -> None:
        self._silence_timer = None
        if self._waiter is None:
            return
        remaining_s = self._wait_started + self._silence_s - self._loop.time()
        if remaining_s > 0:
            self._silence_timer = self._loop.call_later(remaining_s, self._check_silence)
        else:
            self._is_silent = True
            self._failure = f"no data for {self._silence_s:g} s"
            self.abort()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The cast is needed because uvloop's transport is not a subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._nothing_received = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._failure = f"its answer is not HTTP: {error}"
            self.abort()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._has_head and not self._is_complete and self._ends_with_connection() and exc is None:
            self._is_complete = True
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        self._closed_by_engine = not self._failure
        self._failure = self._failure or f"it closed the connection{f': {exc}' if exc else ''}"
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        # After an interim response (100 Continue) the final one follows.
        if self.status < HTTPStatus.OK:
            self.headers = []
        else:
            self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._buffered_bytes += len(body)
        if self._buffered_bytes > READ_AHEAD and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._is_complete = self._has_head
        self._keep_alive = self._parser.should_keep_alive()

    def _ends_with_connection(self) -> bool:
        # Without a length, the body ends with the connection (RFC 9112, section 6.3).
        return not any(name in ("content-length", "transfer-encoding") for name, _ in self.headers)
