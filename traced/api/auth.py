"""Who may ask: the peer's user id on the Unix socket, a bearer token on TCP.

Invariants: the socket file is 0600 and belongs to the daemon's user; a peer with another user id (root apart) is cut
off before a byte of its request is read (SO_PEERCRED, unix(7)); tokens are compared in constant time, all of them every
time; a token shorter than ``LEAST_TOKEN`` characters is refused at start, and TCP is not opened without one. Whoever
was let in can be asked for again later (``Caller.still_let_in``), for answers that last.
How it fails: ``DoorError`` when a door cannot be opened, ``NotKnown`` for a caller without a valid token.
Not covered: TLS (put a proxy in front), and rate limits.

The control API's sockets, served inside the daemon's own event loop.

Invariants: signals stay the daemon's; open event streams do not hold up the end for longer than ``GRACE_S``.
"""

import asyncio
import contextlib
import hmac
import os
import pwd
import socket
import stat
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from uvicorn.protocols.http.h11_impl import H11Protocol

from traced.api.errors import DoorError, NotKnown
from traced.client.models import Role

LEAST_TOKEN = 24  # characters; `python -c "import secrets; print(secrets.token_urlsafe())"` gives 43
BEARER = HTTPBearer(description="A token of api.operator_token_file or api.read_token_file.", auto_error=False)
PEER = struct.Struct("3i")  # pid, uid, gid: struct ucred


@dataclass(frozen=True)
class Caller:
    """Somebody who asks; ``who`` is what the audit says, ``still_let_in`` whether the door would open once more."""

    who: str
    role: Role
    still_let_in: Callable[[], bool] = field(default=lambda: True, compare=False, repr=False)


class PeerChecked(H11Protocol):
    """HTTP on a Unix socket, for the daemon's own user and root only."""

    def connection_made(self, transport: Any) -> None:
        """Cut off anybody else; the peer's user id becomes the request's client."""
        super().connection_made(transport)
        pid, uid, _ = PEER.unpack(
            transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        )
        if uid not in (os.getuid(), 0):
            transport.abort()
        self.client = (f"uid {uid}", pid)


Door = Callable[..., Caller]  # a FastAPI dependency: its parameters say what it looks at


def local(request: Request) -> Caller:
    """The user behind a checked connection to the Unix socket."""
    name: str = request.scope["client"][0]
    with contextlib.suppress(ValueError, KeyError):  # a user id without a name, as in some containers
        name = pwd.getpwuid(int(name.removeprefix("uid "))).pw_name
    return Caller(name, "local")


def by_token(tokens: Callable[[], Mapping[str, Role]]) -> Door:
    """A door for those who bring one of ``tokens``, as they are at the time; the caller is named by its role.

    It raises ``NotKnown``.
    """

    def role_of(given: HTTPAuthorizationCredentials | None) -> Role | None:
        found: Role | None = None
        for token, role in tokens().items():
            if given is not None and hmac.compare_digest(given.credentials.strip().encode(), token.encode()):
                found = role
        return found

    def door(given: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]) -> Caller:
        found = role_of(given)
        if found is None:
            raise NotKnown(
                "this address wants a bearer token", hint="send 'Authorization: Bearer TOKEN', or use the Unix socket"
            )
        return Caller(f"{found} token", found, lambda: role_of(given) is not None)

    return door


def checked_tokens(tokens: Mapping[str, Role]) -> dict[str, Role]:
    """The tokens, when each is long enough; raises ``DoorError`` (which never shows one)."""
    short = next((role for token, role in tokens.items() if len(token) < LEAST_TOKEN), None)
    if short is not None:
        raise DoorError(
            f"the {short} token is shorter than {LEAST_TOKEN} characters",
            hint='python3 -c "import secrets; print(secrets.token_urlsafe())"',
        )
    return dict(tokens)


def unix_socket(path: Path) -> socket.socket:
    """A listening socket at ``path``, 0600. Takes over a path that nobody listens on. Raises ``DoorError``."""
    _make_way(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise DoorError(f"cannot listen at {path}: {error}", hint=f"ls -l {path.parent}") from error
    finally:
        os.umask(before)
    listener.setblocking(False)
    return listener


def _make_way(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if found.st_uid != os.getuid():
        raise DoorError(
            f"{path} belongs to user id {found.st_uid}", hint="--data-dir of your own: the socket lies in it"
        )
    if not stat.S_ISSOCK(found.st_mode):
        raise DoorError(f"{path} is there and is no socket", hint=f"mv {path} {path}.old")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()  # left behind by a daemon that was killed
            return
    raise DoorError(f"something listens at {path} already", hint="traced status")


def tcp_socket(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ``DoorError``."""
    try:
        listener = socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise DoorError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", hint="another api.port"
        ) from error
    listener.setblocking(False)
    return listener


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
