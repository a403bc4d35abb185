"""The control API of a store on real sockets, and its client."""

from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from traced.api.application import control_api
from traced.api.auth import by_token, checked_tokens, listening, local, tcp_socket, unix_socket
from traced.api.control import Control
from traced.api.monitoring import Part, Parts, prometheus
from traced.client import Client, RequestRefused
from traced.client.models import Role

OPERATOR, READER = "o" * 30, "r" * 30


@asynccontextmanager
async def serve_api(control: Control, path: Path, parts: Mapping[str, Part] | None = None) -> AsyncIterator[Client]:
    app = control_api(control, local, Parts(parts or {}, patience_s=3.0), partial(prometheus, control))
    async with listening(app, unix_socket(path)), Client(path) as client:
        yield client


@asynccontextmanager
async def on_tcp(control: Control, token: str, roles: dict[str, Role] | None = None) -> AsyncIterator[Client]:
    """Serve the API on a TCP port and yield a client with ``token``.

    Args:
        roles: The valid tokens with their roles; read at each request, so a test may change them while the API runs.
    """
    tokens = checked_tokens({OPERATOR: "operator", READER: "read-only"}) if roles is None else roles
    door = by_token(lambda: tokens)
    app = control_api(control, door, Parts({}), partial(prometheus, control))
    listener = tcp_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with listening(app, listener), Client(url=url, token=token) as client:
        yield client


async def expect_refusal(request: Awaitable[object]) -> RequestRefused:
    with pytest.raises(RequestRefused) as raised:
        await request
    return raised.value
