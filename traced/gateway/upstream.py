"""Requests to an engine over connections that stay open: HTTP/1.1 as the router needs it.

aiohttp's client took more than half of the time that the router adds to a request; httptools, which uvicorn stands on,
parses in C and leaves the rest to these few lines.

Invariants: a connection carries one request at a time and is used again only after an answer that was read whole; an
answer that its reader gave up closes it, which ends the engine's work; at most ``AHEAD`` bytes of an answer wait for a
reader that is slow. A kept connection that the engine closes within ``STALE_S`` without a byte was closed for idleness:
the request is sent once more, on a new one.
How it fails: ``Unreachable`` where no connection could be made and nothing was sent, ``BrokenOff`` for everything else.
Not covered: redirects, compression (``identity`` is asked for), cookies, HTTP/2.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast
from urllib.parse import urlsplit

import httptools

AHEAD = 2**18  # bytes
STALE_S = 1.0
IDLE_S = 4.0  # uvicorn, in the engines, closes after five


class Unreachable(Exception):
    """No connection could be made: the engine has seen nothing of the request."""


class BrokenOff(Exception):
    """The engine did not answer to the end."""


class Answer:
    """What an engine answers: ``status`` and ``headers`` (names in lower case), and the body as it comes."""

    def __init__(self, connection: "_Connection") -> None:
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    @property
    def content_type(self) -> str:
        """The body's type without its parameters."""
        return self.header("content-type").partition(";")[0].strip().lower()

    def header(self, name: str) -> str:
        """The first header of this name; "" where there is none."""
        return next((value for known, value in self.headers if known == name), "")

    async def chunk(self) -> bytes:
        """What has come of the body since; b"" at its end. Raises ``BrokenOff``."""
        return await self._connection.chunk()

    async def read(self) -> bytes:
        """The rest of the body. Raises ``BrokenOff``."""
        found = await self.chunk()
        while more := await self.chunk():
            found += more
        return found

    def close(self) -> None:
        """Be done with it: the connection is kept after a whole answer, and closed otherwise."""
        self._connection.release()


@dataclass
class Upstream:
    """Connections to engines, by their URLs. ``silence_s`` is how long an engine may say nothing."""

    key: str = ""
    connect_s: float = 5.0
    silence_s: float = 600.0
    _heads: dict[tuple[str, str], bytes] = field(default_factory=dict)
    _idle: "dict[str, deque[_Connection]]" = field(default_factory=dict)

    async def post(self, url: str, path: str, body: bytes) -> Answer:
        """Send JSON and wait for the head of the answer, which has to be closed. Raises as the module says."""
        text = b"%b%d\r\n\r\n%b" % (self._head(url, path), len(body), body)
        connection = self._kept(url)
        if connection is not None:
            try:
                return await self._ask(connection, text)
            except _Stale:
                pass
        try:
            fresh = await self._connect(url)
        except Unreachable as error:
            if connection is None:
                raise
            raise BrokenOff(f"it closed the connection, and then: {error}") from error  # it may have begun
        return await self._ask(fresh, text)

    async def _ask(self, connection: "_Connection", text: bytes) -> Answer:
        try:
            await connection.ask(text)
        except BaseException:
            connection.abort()
            raise
        return Answer(connection)

    def close(self) -> None:
        """Close what is open and idle."""
        for kept in self._idle.values():
            while kept:
                kept.pop().abort()

    def _head(self, url: str, path: str) -> bytes:
        known = self._heads.get((url, path))
        if known is None:
            parts = urlsplit(url)
            lines = [f"POST {parts.path}{path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
            lines += ["Content-Type: application/json", "Accept: */*", "Accept-Encoding: identity"]
            lines += [f"Authorization: Bearer {self.key}"] if self.key else []
            known = self._heads[url, path] = ("\r\n".join(lines) + "\r\nContent-Length: ").encode("latin-1")
        return known

    def _kept(self, url: str) -> "_Connection | None":
        kept = self._idle.get(url)
        while kept:
            connection = kept.pop()  # the one used last: the others grow old and go
            if connection.is_open and asyncio.get_running_loop().time() - connection.since < IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self, url: str) -> "_Connection":
        parts = urlsplit(url)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        kept = self._idle.setdefault(url, deque())
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_s):
                made = await loop.create_connection(
                    lambda: _Connection(loop, kept, self.silence_s), parts.hostname or "", port, ssl=secure
                )
        except (OSError, TimeoutError) as error:
            raise Unreachable(f"cannot connect to {url}: {error or 'no answer'}") from error
        return made[1]


class _Stale(Exception):
    """A kept connection was closed before a byte of the answer."""


class _Connection(asyncio.Protocol):
    """One connection; httptools calls the methods ``on_...``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, kept: "deque[_Connection]", silence_s: float) -> None:
        self._loop, self._kept, self._silence_s = loop, kept, silence_s
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._waits_since = 0.0
        self._broken = ""
        self._hung_up = False  # the engine did, and nothing else broke before
        self._answers = 0  # that were whole
        self.since = 0.0  # idle
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self._pieces: list[bytes] = []
        self._ahead = 0
        self._headed = self._whole = self._stays = self._paused = False
        self._silent = True  # it has said nothing yet

    @property
    def is_open(self) -> bool:
        return not self._broken and self._transport is not None and not self._transport.is_closing()

    async def ask(self, text: bytes) -> None:
        """Send a request and wait for the answer's head."""
        assert self._transport is not None
        self._begin()
        began = self._loop.time()
        self._transport.write(text)
        while not self._headed:
            if self._broken:
                at_once = self._hung_up and self._loop.time() - began < STALE_S
                raise _Stale if self._answers and self._silent and at_once else BrokenOff(self._broken)
            await self._wait()

    async def chunk(self) -> bytes:
        while not self._pieces:
            if self._whole:
                return b""
            if self._broken:
                raise BrokenOff(self._broken)
            await self._wait()
        found = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._ahead = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return found

    def release(self) -> None:
        if self._whole and self._stays and self.is_open and not self._pieces and not self._paused:
            self._answers += 1
            self.since = self._loop.time()
            self._kept.append(self)
        else:
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        self._waiter, self._waits_since = self._loop.create_future(), self._loop.time()
        if self._alarm is None:  # one for many waits: asyncio.timeout at each took 5 % of a request
            self._alarm = self._loop.call_later(self._silence_s, self._listen)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _listen(self) -> None:
        """Whether the engine has been silent for too long."""
        self._alarm = None
        if self._waiter is None:
            return
        left = self._waits_since + self._silence_s - self._loop.time()
        if left > 0:
            self._alarm = self._loop.call_later(left, self._listen)
        else:
            self._broken = f"it has said nothing for {self._silence_s:g} s"
            self.abort()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._silent = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._broken = f"its answer is no HTTP: {error}"
            self.abort()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._headed and not self._whole and self._ends_with_connection() and exc is None:
            self._whole = True
        if self._alarm is not None:
            self._alarm.cancel()
        self._hung_up = not self._broken
        self._broken = self._broken or f"it closed the connection{f': {exc}' if exc else ''}"
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < HTTPStatus.OK:  # 100 Continue and the like: the answer follows
            self.headers = []
        else:
            self._headed = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._ahead += len(body)
        if self._ahead > AHEAD and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._whole = self._headed
        self._stays = self._parser.should_keep_alive()

    def _ends_with_connection(self) -> bool:
        return not _named(self.headers, ("content-length", "transfer-encoding"))


def _named(headers: Sequence[tuple[str, str]], names: Sequence[str]) -> bool:
    return any(name in names for name, _ in headers)
