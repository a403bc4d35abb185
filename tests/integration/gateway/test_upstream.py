"""Connections to engines: kept, given up, stale, silent, slow to be read, cut off - over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from traced.gateway.upstream import READ_AHEAD, ConnectionLost, EngineUnreachable, Upstream

PATH = "/v1/chat/completions"
Play = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
COMPLETE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nContent-Length: 2\r\n\r\n{}"


class Engine:
    """Plays a part per connection and counts them."""

    def __init__(self, *parts: Play) -> None:
        self.parts, self.connections, self.closed = parts, 0, asyncio.Event()
        self.heads: list[bytes] = []

    async def play(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        part = self.parts[min(self.connections, len(self.parts) - 1)]
        self.connections += 1
        try:
            await part(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self.closed.set()

    async def read_request(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        return await reader.readexactly(length)


@asynccontextmanager
async def listening(engine: Engine, **options: Any) -> AsyncIterator[tuple[str, Upstream]]:
    server = await asyncio.start_server(engine.play, "127.0.0.1", 0)
    # A busy machine may stop this process for longer than the default of 5 s.
    upstream = Upstream(**{"connect_s": 60.0, **options})
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", upstream
    finally:
        upstream.close()
        server.close()
        await server.wait_closed()


async def read(upstream: Upstream, url: str, body: bytes = b"{}") -> bytes:
    answer = await upstream.post(url, PATH, body)
    try:
        return await answer.read()
    finally:
        answer.close()


async def test_a_connection_is_used_again_after_a_whole_answer_and_its_key_goes_with_it() -> None:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await engine.read_request(reader)
            writer.write(COMPLETE)

    engine = Engine(respond)
    async with listening(engine, key="secret") as (url, upstream):
        for _ in range(3):
            assert await read(upstream, url) == b"{}"
        answers = await asyncio.gather(read(upstream, url), read(upstream, url))
    assert list(answers) == [b"{}", b"{}"]
    assert engine.connections == 2
    assert b"Authorization: Bearer secret\r\n" in engine.heads[0]


async def test_status_and_headers_are_read_past_a_continue() -> None:
    async def respond_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\n")
        writer.write(b"Content-Type: Application/JSON ; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        await reader.read()

    engine = Engine(respond_once)
    async with listening(engine) as (url, upstream):
        answer = await upstream.post(url, PATH, b"{}")
        assert (answer.status, answer.header("retry-after"), answer.content_type) == (429, "7", "application/json")
        assert await answer.read() == b"abcde"
        answer.close()


async def test_a_stale_connection_is_replaced_and_a_lost_one_is_reported() -> None:
    closing = asyncio.Event()

    async def once_then_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        writer.write(COMPLETE)
        await engine.read_request(reader)  # read, and closed without a word

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        writer.write(COMPLETE[:-1])
        closing.set()

    engine = Engine(once_then_close, half)
    async with listening(engine) as (url, upstream):
        assert await read(upstream, url) == b"{}"
        with pytest.raises(ConnectionLost, match="closed the connection"):
            await read(upstream, url)
    assert engine.connections == 2
    assert closing.is_set()


async def test_a_new_connection_that_is_closed_at_once_is_not_tried_again() -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)

    engine = Engine(close)
    async with listening(engine) as (url, upstream):
        with pytest.raises(ConnectionLost, match="closed the connection"):
            await read(upstream, url)
    assert engine.connections == 1


async def test_closing_an_unfinished_response_closes_its_connection() -> None:
    async def forever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        await reader.read()  # until the other side closes

    engine = Engine(forever)
    async with listening(engine) as (url, upstream):
        answer = await upstream.post(url, PATH, b"{}")
        assert await answer.chunk() == b"x"
        answer.close()
        await engine.closed.wait()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await engine.read_request(reader)
            waiting.set()
            await reader.read()

        waiting = asyncio.Event()
        engine.parts = (silent,)
        engine.closed.clear()
        request_task = asyncio.create_task(upstream.post(url, PATH, b"{}"))
        await waiting.wait()
        request_task.cancel()
        await engine.closed.wait()


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nall of it")

    engine = Engine(old)
    async with listening(engine) as (url, upstream):
        assert await read(upstream, url) == b"all of it"
        assert await read(upstream, url) == b"all of it"
    assert engine.connections == 2


async def test_silence_is_limited_and_counted_from_the_last_byte() -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(6):  # longer than the limit in all, never as long at once
            await asyncio.sleep(0.2)
            writer.write(b"1\r\nx\r\n")
        await reader.read()

    engine = Engine(slow)
    async with listening(engine, silence_s=1) as (url, upstream):
        answer = await upstream.post(url, PATH, b"{}")
        body = b""
        while len(body) < 6:
            body += await answer.chunk()
        with pytest.raises(ConnectionLost, match=r"no data for 1 s"):
            await answer.chunk()
        assert body == b"xxxxxx"
        answer.close()


async def test_a_slow_reader_holds_the_engine_up_and_gets_everything() -> None:
    size = 64 * READ_AHEAD

    async def respond_much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(64):
            writer.write(b"x" * READ_AHEAD)
            await writer.drain()
            sizes.append(READ_AHEAD)
        await reader.read()

    sizes: list[int] = []
    engine = Engine(respond_much)
    async with listening(engine) as (url, upstream):
        answer = await upstream.post(url, PATH, b"{}")
        previous = -1
        while len(sizes) != previous:  # until nothing more goes
            previous = len(sizes)
            await asyncio.sleep(0.05)
        assert sum(sizes) < size
        assert await answer.read() == b"x" * size
        answer.close()


async def test_unreachable_engines_and_invalid_http_raise_different_errors() -> None:
    async def ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        await reader.read()

    engine = Engine(ssh)
    async with listening(engine) as (url, upstream):
        with pytest.raises(ConnectionLost, match="is not HTTP"):
            await read(upstream, url)
    with pytest.raises(EngineUnreachable, match="cannot connect"):
        await read(upstream, url)


async def test_an_unanswered_request_on_a_reused_connection_is_sent_once() -> None:
    async def once_then_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        writer.write(COMPLETE)
        await engine.read_request(reader)
        await reader.read()

    async def once_then_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        writer.write(COMPLETE)
        await engine.read_request(reader)
        writer.write(b"HTTP/1.1 200 O")

    for part, reason in ((once_then_silent, "no data for"), (once_then_half, "closed the connection")):
        engine = Engine(part)
        async with listening(engine, silence_s=1) as (url, upstream):
            await read(upstream, url)
            with pytest.raises(ConnectionLost, match=reason):
                await read(upstream, url)
        assert (engine.connections, len(engine.heads)) == (1, 2)


async def test_an_engine_that_dies_of_a_request_is_not_unreachable() -> None:
    async def once_then_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await engine.read_request(reader)
        writer.write(COMPLETE)
        await engine.read_request(reader)
        server.close()  # nobody listens any more

    engine = Engine(once_then_close)
    server = await asyncio.start_server(engine.play, "127.0.0.1", 0)
    url, upstream = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", Upstream()
    await read(upstream, url)
    with pytest.raises(ConnectionLost, match="and a second attempt failed: cannot connect"):
        await read(upstream, url)


async def test_a_partly_read_response_closes_its_connection() -> None:
    async def respond_much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await engine.read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (2 * READ_AHEAD) + b"x" * 2 * READ_AHEAD)

    engine = Engine(respond_much)
    async with listening(engine, silence_s=2.0) as (url, upstream):
        answer = await upstream.post(url, PATH, b"{}")
        await asyncio.sleep(0.2)  # all of it has come
        answer.close()
        assert await read(upstream, url) == b"x" * 2 * READ_AHEAD
    assert engine.connections == 2
