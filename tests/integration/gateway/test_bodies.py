"""Key, size and rate come before the body, and decompression of a body stops no other request."""

import asyncio
import gzip
import json
import time
import zlib
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from store.database import write_session
from tests.integration.gateway.place import USER, RunningGateway, running_gateway
from tests.integration.gateway.test_keys import ADA, until_status, with_key
from tests.waiting import eventually_async
from traced.gateway.access import create_key

PATHS = ("/v1/chat/completions", "/v1/feedback", "/v1/traces")
REQUEST = json.dumps({"model": "base", "messages": USER}).encode()


async def run(tmp_path: Path, check: Callable[[RunningGateway], Coroutine[Any, Any, None]], **kind: Any) -> None:
    async with running_gateway(tmp_path, **kind) as gateway:
        await check(gateway)


async def add_key(gateway: RunningGateway, name: str = "agent", per_minute: int = 0) -> str:
    with write_session(gateway.store) as session:
        key = create_key(session, ADA, name, per_minute)

    async def is_valid() -> bool:
        models = [await gateway.http.get("/v1/models", headers=headers) for headers in ({}, with_key(key))]
        return [answer.status_code for answer in models] == [401, 200]

    await eventually_async(is_valid)
    return key


async def answer_to_head(gateway: RunningGateway, path: str, *headers: str) -> str:
    """Send the head of a request, nothing of its body; returns the head of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    try:
        writer.write("\r\n".join([f"POST {path} HTTP/1.1", "Host: router", *headers, "", ""]).encode())
        async with asyncio.timeout(5):
            return (await reader.readuntil(b"\r\n\r\n")).decode()
    finally:
        writer.close()


@pytest.mark.parametrize("path", PATHS)
async def test_key_size_and_rate_are_checked_before_the_body(tmp_path: Path, path: str) -> None:
    async def check(gateway: RunningGateway) -> None:
        kind = "Content-Type: application/json"
        large, small = f"Content-Length: {2 * 2**20}", "Content-Length: 10"
        assert " 413 " in await answer_to_head(gateway, path, kind, large)
        key = f"Authorization: Bearer {await add_key(gateway, per_minute=1)}"
        for expect in ([], ["Expect: 100-continue"]):
            assert " 401 " in await answer_to_head(gateway, path, kind, large, *expect)
        assert " 413 " in await answer_to_head(gateway, path, kind, large, key)
        assert " 100 " in await answer_to_head(gateway, path, kind, small, key, "Expect: 100-continue")
        assert " 429 " in await answer_to_head(gateway, path, kind, small, key)

    await run(tmp_path, check, settings={"serving.body_mb": 1})


@cache
def bomb() -> bytes:
    return gzip.compress(bytes(2**28))


@pytest.mark.parametrize("path", PATHS)
async def test_bombs_are_refused_and_stop_no_other_request(tmp_path: Path, path: str) -> None:
    async def check(gateway: RunningGateway) -> None:
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        bombs = [asyncio.create_task(gateway.http.post(path, content=bomb(), headers=headers)) for _ in range(4)]
        stall_s, checked_at = 0.0, time.perf_counter()
        while not all(task.done() for task in bombs):
            await asyncio.sleep(0.005)
            stall_s, checked_at = max(stall_s, time.perf_counter() - checked_at), time.perf_counter()
        assert [task.result().status_code for task in bombs] == [413] * 4
        # The client is in the event loop of the router.
        assert stall_s < 1.0

    await run(tmp_path, check)


def raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush()


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", gzip.compress(REQUEST), 200),
        ("x-gzip", gzip.compress(REQUEST[:9]) + gzip.compress(REQUEST[9:]), 200),
        ("deflate", zlib.compress(REQUEST), 200),
        ("deflate", raw_deflate(REQUEST), 200),
        ("identity", REQUEST, 200),
        ("gzip", gzip.compress(REQUEST)[:-9], 400),
        ("gzip", REQUEST, 400),
        ("br", REQUEST, 415),
        ("gzip, gzip", gzip.compress(gzip.compress(REQUEST)), 415),
    ],
)
async def test_compressed_bodies_are_decompressed_or_refused(
    tmp_path: Path, encoding: str, body: bytes, status: int
) -> None:
    async def check(gateway: RunningGateway) -> None:
        headers = {"Content-Encoding": encoding}
        answer = await gateway.http.post("/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == status, answer.text
        assert [request["messages"] for request in gateway.engine.requests] == [USER] * (status == 200)

    await run(tmp_path, check)


async def test_the_key_of_anthropics_clients_is_accepted(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        key = await add_key(gateway)
        for path in ("/v1/chat/completions", "/v1/traces"):
            for headers, status in (({"x-api-key": key}, 200), ({"x-api-key": key[:-1]}, 401)):
                headers |= {"Content-Type": "application/json"}
                body = REQUEST if "chat" in path else b"{}"
                answer = await gateway.http.post(path, content=body, headers=headers)
                assert answer.status_code == status, path
        # Some clients send a placeholder in the other header.
        assert (await gateway.ask("base", headers=with_key("none") | {"x-api-key": key})).status_code == 200

    await run(tmp_path, check)


async def test_one_key_cannot_take_all_slots(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        first_key, second_key = await add_key(gateway, "one"), await add_key(gateway, "other")
        gateway.engine.delay_s = 30
        running = [asyncio.create_task(gateway.ask("base", headers=with_key(first_key))) for _ in range(3)]
        await eventually_async(lambda: gateway.engine.decoding == 3)
        response = await gateway.ask("base", headers=with_key(first_key))
        assert (response.status_code, response.json()["error"]["code"]) == (429, "key_concurrency")
        assert int(response.headers["Retry-After"]) > 0
        gateway.engine.delay_s = 0
        assert (await gateway.ask("base", headers=with_key(second_key))).status_code == 200
        for task in running:
            task.cancel()
        await eventually_async(lambda: not gateway.engine.running)
        await until_status(gateway, 200, with_key(first_key))

    await run(tmp_path, check, settings={"serving.concurrency": 4})


async def test_every_answer_names_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(gateway: RunningGateway) -> None:
        answers = [
            await gateway.http.get("/alive"),
            await gateway.http.get("/ready"),
            await gateway.http.get("/v1/models"),
            await gateway.http.get("/nowhere"),
            await gateway.http.get("/v1/chat/completions"),
            await gateway.http.post("/v1/chat/completions", content=b"{"),
            await gateway.http.post("/v1/chat/completions", content=b" " * 2**21),
            await gateway.http.post("/v1/traces", content=b"{", headers={"Content-Type": "application/json"}),
            await gateway.http.post("/v1/feedback", content=b"{}"),
            await gateway.ask("base"),
            await gateway.ask("base", stream=True),
            await gateway.ask("unknown"),
        ]
        with monkeypatch.context() as patched:
            patched.setattr("traced.gateway.forwarding.with_model", lambda *_: 1 / 0)
            answers.append(await gateway.ask("base", headers={"X-Traced-Conversation": "defect"}))
        await add_key(gateway, per_minute=1)
        answers.append(await gateway.ask("base"))
        ids = [answer.headers["X-Traced-Request"] for answer in answers]
        statuses = [answer.status_code for answer in answers]
        assert statuses == [200, 200, 200, 404, 405, 400, 413, 400, 400, 200, 200, 404, 500, 401]
        assert len(set(ids)) == len(ids)
        await eventually_async(lambda: gateway.exchanges("defect"))
        assert [exchange.id for exchange in gateway.exchanges("defect")] == [ids[-2]]

    await run(tmp_path, check, settings={"serving.body_mb": 1})


async def test_a_body_that_never_arrives_does_not_delay_the_stop(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: router\r\nContent-Length: 50\r\n\r\n{")
        await asyncio.sleep(0.2)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"router_stops" in answer
    writer.close()
