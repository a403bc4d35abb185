"""The control API's sockets, served inside the daemon's own event loop.

Invariants: signals stay the daemon's; open event streams do not hold up the end for longer than ``GRACE_S``.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from fastapi import FastAPI

from traced.service.doors import PeerChecked

GRACE_S = 2


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the daemon."""
        yield


@contextlib.asynccontextmanager
async def listening(app: FastAPI, listener: socket.socket) -> AsyncIterator[None]:
    """Serve ``app`` on a bound socket while the block runs; a Unix socket's peers are checked."""
    local = listener.family == socket.AF_UNIX
    config = uvicorn.Config(
        app,
        http=PeerChecked if local else "h11",
        loop="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="control API")
    try:
        yield
    finally:
        server.should_exit = True
        await serving
        listener.close()
