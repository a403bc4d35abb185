"""Authentication and sockets of the control API: peer user id on the Unix socket, bearer token on TCP.

Invariants: the socket file has mode 0600; peers other than the daemon's user and root are disconnected before their
request is read. How it fails: ``DoorError`` for a socket that cannot be opened, ``NotKnown`` for an unauthenticated
caller. Not covered: TLS (use a proxy) and rate limits.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

import uvicorn
from fastapi import Depends, FastAPI, Header, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy import Engine
from uvicorn.protocols.http.h11_impl import H11Protocol

from store.database import read_session
from store.records import ApiToken
from store.repositories.tokens import find_token
from traced.api.errors import DoorError, NotKnown
from traced.api.tokens import hash_token
from traced.client.models import Role
from traced.core.ownership import user_name

MAX_KEY = 200  # characters
KEY_DESCRIPTION = "Any unique text: a request that is repeated with it changes nothing and gets the first response."
BEARER = HTTPBearer(description="A token of a person: traced tokens add NAME.", auto_error=False)
WATCH_S = 1.0  # seconds between two looks at the socket file
PEER = struct.Struct("3i")  # pid, uid, gid: struct ucred


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestKey:
    """The idempotency key of a request, and the digest of what the caller requests."""

    key: str
    digest: str


@dataclass(frozen=True)
class Caller:
    """An authenticated caller.

    ``who`` is stored in the audit log, ``still_let_in`` checks the credentials again, ``request`` identifies the
    request so that its repetition changes nothing.
    """

    who: str
    role: Role
    request: RequestKey | None = None
    still_let_in: Callable[[], bool] = field(default=lambda: True, compare=False, repr=False)


class PeerChecked(H11Protocol):
    """HTTP on a Unix socket, for the daemon's own user and root only."""

    def connection_made(self, transport: Any) -> None:
        """Disconnect other users, and set the peer's user id as the client of the request."""
        super().connection_made(transport)
        # SO_PEERCRED (unix(7)) is set by the kernel: the peer cannot forge it.
        pid, uid, _ = PEER.unpack(
            transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        )
        if uid not in (os.getuid(), 0):
            transport.abort()
        self.client = (f"uid {uid}", pid)


# A FastAPI dependency: its parameters declare what it reads of the request.
Door = Callable[..., Caller]


def local(request: Request) -> Caller:
    """Return the user of a checked connection to the Unix socket as the caller."""
    return Caller(user_name(int(request.scope["client"][0].removeprefix("uid "))), "local")


def by_token(store: Engine) -> Door:
    """Return a dependency that authenticates by bearer token and names the caller after the token's person.

    The dependency raises ``NotKnown``. The store is read for every request, so that a new token and a revocation take
    effect at once.
    """

    def token_of(credentials: HTTPAuthorizationCredentials | None) -> ApiToken | None:
        if credentials is None:
            return None
        # Found by the hash, so the duration reveals nothing about the tokens.
        with read_session(store) as session:
            return find_token(session, hash_token(credentials.credentials.strip()))

    def door(credentials: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]) -> Caller:
        token = token_of(credentials)
        if token is None:
            raise NotKnown(
                "this address requires a valid token of a person",
                hint="traced tokens add NAME --role ROLE prints one; send it as 'Authorization: Bearer TOKEN'",
            )
        return Caller(token.name, cast(Role, token.role), still_let_in=lambda: token_of(credentials) is not None)

    return door


def with_request_key(door: Door) -> Callable[..., Awaitable[Caller]]:
    """Return a dependency that authenticates by ``door`` and reads the request's ``Idempotency-Key``."""

    async def caller_with_key(
        request: Request,
        caller: Annotated[Caller, Depends(door)],
        idempotency_key: Annotated[str, Header(max_length=MAX_KEY, description=KEY_DESCRIPTION)] = "",
    ) -> Caller:
        if not idempotency_key:
            return caller
        content = [caller.who, caller.role, request.method, request.url.path, (await request.body()).hex()]
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return replace(caller, request=RequestKey(idempotency_key, digest))

    return caller_with_key


def unix_socket(path: Path) -> socket.socket:
    """Open a listening socket at ``path`` with mode 0600, replacing a stale one; raises ``DoorError``."""
    _remove_stale_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        # Nobody can connect before ``listen``. A umask would hold for the other threads of a running service too.
        path.chmod(0o600)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise DoorError(f"cannot listen at {path}: {error}", hint=f"ls -l {path.parent}") from error
    listener.setblocking(False)
    return listener


@contextlib.asynccontextmanager
async def listening_at(app: FastAPI, path: Path) -> AsyncIterator[None]:
    """Serve ``app`` on a Unix socket at ``path`` during the block; a file that somebody removes is created again.

    Raises ``DoorError`` if the socket cannot be opened at first.
    """
    server = contextlib.AsyncExitStack()
    await server.enter_async_context(listening(app, unix_socket(path)))
    file_id = _file_id(path)

    async def keep_listening() -> None:
        nonlocal server, file_id
        problem = ""
        while True:
            await asyncio.sleep(WATCH_S)
            if _file_id(path) == file_id:
                continue
            try:
                listener = unix_socket(path)
            except (DoorError, OSError) as error:
                if problem != str(error):
                    problem = str(error)
                    log.error("the socket %s was removed and cannot be created again: %s", path, problem)
                continue
            log.warning("the socket %s was removed and is created again", path)
            file_id, problem = _file_id(path), ""
            former, server = server, contextlib.AsyncExitStack()
            await server.enter_async_context(listening(app, listener))
            await former.aclose()

    watch = asyncio.create_task(keep_listening(), name="socket of the control API")
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await server.aclose()


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _remove_stale_socket(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if status.st_uid != os.getuid():
        raise DoorError(
            f"{path} belongs to user id {status.st_uid}",
            hint="choose a --data-dir that belongs to you; the socket lies in it",
        )
    if not stat.S_ISSOCK(status.st_mode):
        raise DoorError(f"{path} exists and is not a socket", hint=f"mv {path} {path}.old")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()  # left behind by a daemon that was killed
            return
    raise DoorError(f"another process already listens at {path}", hint="traced status")


def tcp_socket(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket; raises ``DoorError``."""
    try:
        listener = socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise DoorError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", hint="choose another api.port"
        ) from error
    listener.setblocking(False)
    return listener


# Open event streams would otherwise hold up the shutdown.
GRACE_S = 2


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the daemon handles signals."""
        yield


@contextlib.asynccontextmanager
async def listening(app: FastAPI, listener: socket.socket) -> AsyncIterator[None]:
    """Serve ``app`` on a bound socket during the block; the peers of a Unix socket are checked."""
    is_unix = listener.family == socket.AF_UNIX
    config = uvicorn.Config(
        app,
        http=PeerChecked if is_unix else "h11",
        loop="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config)
    server_task = asyncio.create_task(server.serve(sockets=[listener]), name="control API")
    try:
        yield
    finally:
        server.should_exit = True
        await server_task
        listener.close()
