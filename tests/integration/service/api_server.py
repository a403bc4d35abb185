"""The control API of a store on real sockets, and its client."""

from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from store.database import read_session, write_session
from store.records import ApiToken
from store.repositories.tokens import find_token, save_token
from tests.unit.store.chain import T0
from traced.api.application import control_api
from traced.api.auth import by_token, listening, local, tcp_socket, unix_socket
from traced.api.control import Control
from traced.api.monitoring import Part, Parts, prometheus
from traced.api.tokens import TokenRole, hash_token
from traced.client import Client, RequestRefused

OPERATOR, READER, ADMIN = "o" * 30, "r" * 30, "a" * 30
PERSONS: dict[str, tuple[str, TokenRole]] = {
    OPERATOR: ("olga", "operator"),
    READER: ("vic", "viewer"),
    ADMIN: ("ada", "admin"),
}


@asynccontextmanager
async def serve_api(control: Control, path: Path, parts: Mapping[str, Part] | None = None) -> AsyncIterator[Client]:
    app = control_api(control, local, Parts(parts or {}, patience_s=3.0), partial(prometheus, control))
    async with listening(app, unix_socket(path)), Client(path) as client:
        yield client


@asynccontextmanager
async def on_tcp(control: Control, token: str) -> AsyncIterator[Client]:
    """Serve the API on a TCP port and yield a client with ``token``, which is added if it is one of ``PERSONS``."""
    if token in PERSONS:
        add_token(control, token)
    app = control_api(control, by_token(control.store), Parts({}), partial(prometheus, control))
    listener = tcp_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with listening(app, listener), Client(url=url, token=token) as client:
        yield client


def add_token(control: Control, token: str) -> None:
    name, role = PERSONS[token]
    with read_session(control.store) as session:
        is_valid = find_token(session, hash_token(token)) is not None
    if not is_valid:
        with write_session(control.store) as session:
            save_token(session, ApiToken(name, role, hash_token(token), T0, "root"))


async def expect_refusal(request: Awaitable[object]) -> RequestRefused:
    with pytest.raises(RequestRefused) as raised:
        await request
    return raised.value
