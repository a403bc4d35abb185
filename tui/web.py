"""Serve the terminal interface to browsers (`traced tui --web`), with one app process for each visitor.

    browser ── WebSocket ── this server on loopback ── stdin/stdout ── `python -m tui`

Invariants: the server listens on loopback only. Access needs the key in the printed URL. The key becomes a cookie for
one secret path, because browsers send cookies to every port of a host: other users of the machine and pages of other
sites get no access. Requests for another host name (DNS rebinding) are refused, and pages load nothing from elsewhere.
The daemon's token reaches the apps through their environment, never through a command line. All apps end with the
server. If the port is taken, the command prints the reason and exits with code 1. Not covered: TLS and other machines
(use an SSH tunnel to the same port).
"""

import asyncio
import hmac
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web
from rich.console import Console
from textual_serve.app_service import AppService
from textual_serve.server import Server

HOST = "127.0.0.1"
COOKIE = "traced-tui"
# Seconds that an app gets to end before it is killed.
END_S = 5.0
# Each visitor costs a process, so the number of visitors is bounded.
MAX_VISITORS = 16
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
    " font-src 'self' data:; connect-src 'self' ws://{host}; frame-ancestors 'none'; base-uri 'none'"
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Visit(AppService):
    """The app process of one visitor."""

    async def end(self) -> None:
        """Stop the app, and kill it if it does not stop in time."""
        try:
            with suppress(TimeoutError, OSError):
                async with asyncio.timeout(END_S):
                    await self.stop()
            # `AppService.stop` may return while the process is still running.
            if self._process is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(END_S):
                        await self._process.wait()
        finally:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()


class Loopback(Server):
    """Textual's web server, bound to loopback and protected by a key."""

    def __init__(self, command: list[str], port: int) -> None:
        super().__init__(f"exec {shlex.join(command)}", host=HOST, port=port, title="traced")
        self.key, self.place = secrets.token_urlsafe(24), f"/{secrets.token_urlsafe(12)}"
        self._open: set[web.WebSocketResponse] = set()

    @property
    def entrance(self) -> str:
        """The URL with the key."""
        return f"{self.public_url}{self.place}/?key={self.key}"

    async def application(self) -> web.Application:
        """Return Textual's application behind the middleware that checks the key."""
        app = web.Application(middlewares=[self._door])
        app.add_subapp(self.place, await self._make_app())
        return app

    async def on_startup(self, app: web.Application) -> None:
        """Print the URL only: Textual's server would print the command too."""
        Console().print(f"traced in a browser: {self.entrance}\nCtrl-C ends it.", highlight=False, soft_wrap=True)

    async def on_shutdown(self, app: web.Application) -> None:
        """Close every visitor's connection, which ends the visitor's app."""
        await asyncio.gather(
            *(connection.close(code=1001, message=b"the server ends") for connection in list(self._open))
        )

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Run an app for as long as the visitor's connection lasts."""
        if len(self._open) >= MAX_VISITORS:
            raise web.HTTPServiceUnavailable(
                text=f"the maximum of {MAX_VISITORS} visitors is reached; close another browser tab"
            )
        connection = web.WebSocketResponse(heartbeat=15, timeout=END_S)

        async def close() -> None:
            await connection.close()

        self._open.add(connection)
        try:
            await connection.prepare(request)
            visit = Visit(
                self.command,
                write_bytes=connection.send_bytes,
                write_str=connection.send_str,
                close=close,
                download_manager=self.download_manager,
            )
            try:
                await visit.start(_cells(request, "width", 80), _cells(request, "height", 24))
                await self._process_messages(connection, visit)
            finally:
                await visit.end()
        finally:
            self._open.discard(connection)
        return connection

    def _is_key(self, candidate: str) -> bool:
        return hmac.compare_digest(candidate.encode(), self.key.encode())

    @web.middleware
    async def _door(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host = f"{self.host}:{self.port}"
        if request.host != host or request.headers.get("Origin", self.public_url) != self.public_url:
            raise web.HTTPForbidden(text=f"wrong address; open {self.public_url}")
        index = f"{self.place}/"
        if request.path == index and self._is_key(request.query.get("key", "")):
            answer: web.StreamResponse = web.Response(status=303, headers={"Location": index})
            answer.set_cookie(COOKIE, self.key, httponly=True, samesite="Strict", path=index)
            return answer
        if not self._is_key(request.cookies.get(COOKIE, "")):
            raise web.HTTPForbidden(text="the key is missing or wrong; open the URL that `traced tui --web` printed")
        answer = await handler(request)
        if not answer.prepared:
            answer.headers["Content-Security-Policy"] = POLICY.format(host=host)
            answer.headers["Referrer-Policy"] = "no-referrer"
            # Without this, browsers keep a page and its app alive after the user has left the page.
            answer.headers["Cache-Control"] = "no-store"
        return answer


def serve(daemon_options: list[str], port: int, *, write: bool) -> int:
    """Serve until Ctrl-C or SIGTERM and return the exit code; each `python -m tui` gets ``daemon_options``."""
    try:
        listener = socket.create_server((HOST, port))
    except OSError as error:
        print(f"port {port} of {HOST}: {error.strerror or error}; try another --port", file=sys.stderr)
        return 1
    command = [
        sys.executable,
        "-m",
        "tui",
        *daemon_options,
        *([] if write else ["--read-only"]),
        "--parent",
        str(os.getpid()),
    ]
    server = Loopback(command, listener.getsockname()[1])
    web.run_app(server.application(), sock=listener, shutdown_timeout=END_S, print=None, access_log=None)
    return 0


def _cells(request: web.Request, name: str, default: int) -> int:
    value = request.query.get(name, "")
    return min(max(int(value), 20), 1000) if value.isdecimal() and len(value) < 6 else default
