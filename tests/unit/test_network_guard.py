import asyncio
import os
import socket

import pytest

from tests.guard.sitecustomize import NetworkForbidden, is_loopback


def test_the_network_is_out_of_reach() -> None:
    with socket.socket() as probe, pytest.raises(NetworkForbidden, match=r"192\.0\.2\.1"):
        probe.connect(("192.0.2.1", 80))
    with pytest.raises(NetworkForbidden, match=r"model\.example"):
        socket.getaddrinfo("model.example", 443)


async def test_loopback_is_within_reach() -> None:
    async def exchange() -> bytes:
        def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello")
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection("localhost", server.sockets[0].getsockname()[1])
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
            return answer

    assert await exchange() == b"hello"


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.9", True), ("::1", True), ("10.0.0.1", False), ("x.test", False)]
)
def test_what_counts_as_loopback(host: str, local: bool) -> None:
    assert is_loopback(host) is local


def test_no_key_reaches_a_test() -> None:
    assert not [name for name in os.environ if name.endswith("_API_KEY")]
    assert os.environ["OPENAI_BASE_URL"].startswith("http://127.0.0.1:9/")
